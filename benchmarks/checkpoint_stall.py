"""Measure how long a checkpoint stops the training of each process, in the foreground and in the background.

python -m benchmarks.checkpoint_stall --out runs/checkpoint_stall.json

A save stops training from the end of the drain to the first microbatch that follows. In the background, that is the time of a copy
in memory. The thread that writes then competes with training for processors: the next microbatches take longer, which is measured
too. The network is RevNet-50 at full size for CIFAR-10, with one stage per block. Epochs are shorter on a GPU: the table has the
epoch of which the whole interruption by a save in the background is 5 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import benchmark_parser, in_processes, save, timed
from benchmarks.two_stages import Noise, sgd
from petra import Pipeline, Recipe
from petra.models import MODELS
from petra.settings import Numerics
from petra.specs import TensorSpec
from petra.training import Checkpoints
from petra.training.state import state_of

IMAGES = 50_000
"""Images in an epoch of CIFAR-10."""
PART = 0.05
"""Accepted part of an epoch."""


def measure(rank: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Train and save in turns in one of the processes. All processes must call this function.

    Returns:
        ``bytes`` of this process's state; medians in seconds: ``microbatch``, ``foreground`` and ``copy`` (how long a save stops
        training), ``write`` (how long the thread then writes), ``slower`` (how much longer training takes meanwhile).
    """
    model = MODELS[options.model](10, width=options.width, stem="cifar")
    inputs = TensorSpec((options.batch, 3, options.size, options.size), torch.float32)
    pipeline = Pipeline(model, inputs, Recipe(sgd), numerics=Numerics(channels_last=True))
    data = Noise(inputs)
    front, back = Checkpoints(folder / "front"), Checkpoints(folder / "back", background=True)

    def train() -> float:
        return timed(lambda: pipeline.train(data, options.microbatches))

    train()  # warms up, and makes the optimizer's state
    found: dict[str, list[float]] = {key: [] for key in ("microbatch", "foreground", "copy", "write", "slower")}
    for _ in range(options.rounds):
        alone = train()
        found["microbatch"].append(alone / options.microbatches)
        found["foreground"].append(timed(lambda: front.save(pipeline, {})))
        started = time.perf_counter()
        found["copy"].append(timed(lambda: back.save(pipeline, {})))
        beside = train()
        back.wait()
        found["write"].append(time.perf_counter() - started)
        found["slower"].append(max(0.0, beside - alone))
    size = sum(value.nbytes for value in state_of(pipeline).values())
    return {"bytes": size, **{key: statistics.median(values) for key, values in found.items()}}


def table(rows: list[dict[str, float]], batch: int) -> str:
    """Return a Markdown table with a row for each process."""
    epoch = max(row["microbatch"] for row in rows) * (IMAGES // batch)
    lines = [
        f"an epoch of {IMAGES} images: {epoch:.0f} s",
        "",
        "| process | state (MB) | foreground (s) | copy (s) | training slower by (s) | write (s) "
        "| foreground, part of the epoch | background | epoch of which it is 5 % (s) |",
        "|---" * 9 + "|",
    ]
    for rank, row in enumerate(rows):
        background = row["copy"] + row["slower"]
        lines.append(
            f"| {rank + 1} | {row['bytes'] / 1e6:.0f} | {row['foreground']:.2f} | {row['copy']:.2f} | {row['slower']:.2f} "
            f"| {row['write']:.2f} | {row['foreground'] / epoch:.3%} | {background / epoch:.3%} | {background / PART:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = benchmark_parser(__doc__, 3)
    parser.add_argument("--model", default="revnet50", help="one of the image models")
    parser.add_argument("--width", type=float, default=1.0, help="multiple of the network's width")
    parser.add_argument("--size", type=int, default=32, help="side of an image in pixels")
    parser.add_argument("--batch", type=int, default=64, help="batch size")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches between two saves")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the stages")
    parser.add_argument("--folder", help="folder on the storage to measure (default: that of temporary files)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = in_processes(options.processes, measure, options, Path(folder))
    print(table(rows, options.batch))
    save(options, {"processes": rows})


if __name__ == "__main__":
    main()
