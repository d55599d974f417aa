"""Train a tiny network of four stages in four processes for a long time, and check that memory and open files do not grow.

``python -m stress.soak --microbatches 100000``

The run has 100 epochs, each with an evaluation and a checkpoint. After each epoch, every process records its resident memory, its
open files, and the epoch's processor and wall time. The report compares the second tenth of the run with the last tenth, because
memory pools fill up in the first tenth, and for memory also the sixth. torch's flight recorder is off: it keeps the last 2,000
collectives, about 2 MiB, which would count as growth until it is full. The exit status is 1 if a process grew.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch

from petra import Pipeline, Recipe
from petra.settings import Runtime
from petra.training import Checkpoints, Trainer
from stress.frame import parser_of
from tests.support.nets import RandomSource, mixed_net
from tests.support.processes import run_processes

WORLD, EPOCHS = 4, 100
MEMORY = {"second": 0.01, "sixth": 0.005}
"""Accepted relative growth of a process's memory from these tenths of the run to the last."""


class Epochs(RandomSource):
    """Random microbatches in epochs of a given length."""

    batches = 2

    def __init__(self, batches_per_epoch: int) -> None:
        super().__init__()
        self.batches_per_epoch, self.unit, self.bytes_per_target = batches_per_epoch, "images", None


def train(rank: int, microbatches: int, transport: str, folder: str) -> list[dict[str, float]]:
    """Train in one process, and return its samples, one per epoch."""
    data = Epochs(microbatches // EPOCHS)
    pipeline = Pipeline(
        mixed_net(dropout=0.1),
        data.spec,
        Recipe(lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), lambda t: 0.01),
        k=4,
        stages=WORLD,
        runtime=Runtime(transport=transport),
    )
    trainer = Trainer(pipeline, data, data, checkpoints=Checkpoints(Path(folder)))  # type: ignore[arg-type]
    samples = []
    for epoch in range(1, EPOCHS + 1):
        started, used = time.perf_counter(), time.process_time()
        trainer.fit(epoch)
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        seconds, processor = time.perf_counter() - started, time.process_time() - used
        files = len(os.listdir("/proc/self/fd"))
        samples.append({"memory": memory, "files": files, "seconds": seconds, "processor_seconds": processor})
    return samples


def means(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the means over the second, the sixth and the last tenth of one process's epochs."""
    tenth = len(samples) // 10
    parts = {"second": samples[tenth : 2 * tenth], "sixth": samples[5 * tenth : 6 * tenth], "last": samples[-tenth:]}
    return {key: {name: mean(s[key] for s in part) for name, part in parts.items()} for key in samples[0]}


def grew(memory: dict[str, float], files: dict[str, float]) -> bool:
    """Return whether a process's memory or number of files grew more than accepted."""
    more = any(memory["last"] > (1 + accepted) * memory[tenth] for tenth, accepted in MEMORY.items())
    return more or files["last"] > files["second"]


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--microbatches", type=int, default=100_000, help=f"in total, a multiple of {EPOCHS} (default 100000)")
    parser.add_argument("--transport", choices=("lockstep", "edge"), default="lockstep")
    options = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.microbatches, options.transport, f"{folder}/checkpoints")
        samples = run_processes(WORLD, train, Path(folder) / "run", *arguments, timeout=options.microbatches)
    rows = [means(own) for own in samples]
    for rank, row in enumerate(rows):
        print(f"process {rank}: {row}")
    sys.exit(any(grew(row["memory"], row["files"]) for row in rows))


if __name__ == "__main__":
    main()
