"""Private names of torch, and the memory that a process keeps: page faults show whether the allocator reuses freed tensors."""

import gc
import re
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from launch.run.training import prepare_process
from petra.diagnostics.process_memory import keep_freed_memory
from tests.structure import ROOT, modules
from tests.support.commands import planned

PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._[a-z]\w*|from torch[\w.]* import .*\b_[a-z]\w*|from torch[\w.]*\._[a-z]"
    r"|\._(?:version|backward_hooks|post_accumulate_grad_hooks|cdata|get_backend|timeout)\b|\b_NormBase\b"
)


def test_only_one_file_uses_private_names_of_torch() -> None:
    found = {name: PRIVATE.findall(path.read_text(encoding="utf-8")) for name, path in modules(ROOT).items()}
    assert {name for name, uses in found.items() if uses} == {"petra.torch_private"}


FAULTS = """
import resource
import torch
from petra.diagnostics.process_memory import keep_freed_memory

print(keep_freed_memory())
torch.set_num_threads(1)
for i in range(18):
    if i == 8:  # the heap has its final size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    found = [torch.full((64, 2**18), float(i)) for i in range(2)]
    del found
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_freed_memory_is_reused_unless_the_environment_configures_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=600, check=True)
    kept, faults = done.stdout.split()
    assert kept == "True"
    assert int(faults) < 20  # ten calls with two tensors of 64 MiB would touch 640 pages of 2 MiB, or 327,680 pages of 4 KiB
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")
    assert not keep_freed_memory()


def test_a_run_frees_what_the_last_one_left_and_sets_options_of_torch() -> None:
    setup = planned("trainer.device=cpu", "trainer.matmul_precision=high", "trainer.cudnn_benchmark=true")
    gc.disable()
    try:
        cycle = nn.Identity()
        left, cycle.itself = weakref.ref(cycle), [cycle]
        del cycle
        prepare_process(setup)
        assert left() is None
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.allow_tf32
        prepare_process(planned("trainer.device=cpu"))
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.allow_tf32
    finally:
        gc.enable()
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
        torch.backends.cudnn.allow_tf32 = True
