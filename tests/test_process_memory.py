"""Page faults show whether the allocator reuses the memory of freed tensors."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from petra.process_memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(keep_freed_memory())
def twice():
    return [torch.full((64, 2**18), float(i)) for i in range(2)]

torch.set_num_threads(1)
for _ in range(3):
    twice()
before = faults()
for _ in range(10):
    twice()
print(faults() - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
@pytest.mark.parametrize("environment", [{}, {"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}])
def test_freed_memory_is_reused_unless_the_environment_configures_malloc(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=True)
    kept, faults = done.stdout.split()
    assert kept == str(not environment)
    # Ten calls with two tensors of 64 MiB touch 640 pages of 2 MiB, or 327,680 pages of 4 KiB.
    assert int(faults) < 20 if not environment else int(faults) >= 640
