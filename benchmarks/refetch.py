"""Measure fetching the first stage's inputs again instead of storing them: time of a microbatch, and stored bytes.

Contestants train the same pipeline, with one stage per block in one process, on augmented 32x32 images in memory and on JPEG files.
Without workers, times are CPU times of the process, which other processes hardly affect.

python -m benchmarks.refetch --out runs/refetch.json
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmarks.report import alternate, benchmark_parser, machine, ratio, save, spread, table
from petra import Pipeline, Recipe, Runtime, TensorSpec
from petra.data import Dataset, TrainSource, load_dataset
from petra.diagnostics.activation_memory import ActivationMemory
from petra.models import revnet18
from petra.training import sgd

SIDE = 400
"""Shorter side of the JPEG images in pixels, about the average of ImageNet."""


class Setting(NamedTuple):
    """Data that contestants train on.

    Attributes:
        name: What is read.
        dataset: Images of two classes or more.
        batch: Images per microbatch.
        workers: Processes that prepare microbatches; refetched ones have as many of their own.
    """

    name: str
    dataset: Dataset
    batch: int
    workers: int


def jpeg_files(folder: Path) -> Dataset:
    """Write 128 JPEG files of smooth noise, 500x400 pixels, and return them as a data set of two classes."""
    rng = np.random.default_rng(0)
    for i in range(128):
        path = folder / ("train", "val")[i % 2] / f"class{i // 2 % 2}" / f"{i}.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(rng.integers(0, 256, (SIDE // 8, SIDE * 5 // 32, 3), dtype=np.uint8))
        noise.resize((SIDE * 5 // 4, SIDE), Image.Resampling.BICUBIC).save(path, quality=90)
    return load_dataset("imagenet", root=folder, size=224)


def build(setting: Setting, width: float, refetch: bool) -> tuple[Pipeline, TrainSource]:
    """Return the pipeline of a contestant, and its data."""
    size = setting.dataset.size
    pipeline = Pipeline(
        revnet18(setting.dataset.classes, width=width, stem="imagenet" if size > 64 else "cifar"),
        TensorSpec((setting.batch, 3, size, size), torch.float32),
        Recipe(sgd, lambda t: 0.01),
        k=4,
        runtime=Runtime(refetch=refetch),
    )
    return pipeline, TrainSource(setting.dataset, setting.batch, seed=0, workers=setting.workers)


def seconds(pipeline: Pipeline, source: TrainSource, microbatches: int, clock: Callable[[], float]) -> float:
    """Return the seconds of a microbatch."""
    start = clock()
    pipeline.train(source, microbatches)
    return (clock() - start) / microbatches


def stored_bytes(pipeline: Pipeline, source: TrainSource, microbatches: int) -> int:
    """Return the most bytes that stage 1 stores between its forwards and backwards."""
    with ActivationMemory(0, pipeline.stages[0]).attached(pipeline.hooks) as meter:
        pipeline.train(source, microbatches)
    return meter.peak


def measure(setting: Setting, options: argparse.Namespace) -> dict[str, object]:
    """Compare stored with refetched inputs on the data of a setting."""
    made = {name: build(setting, options.width, name == "refetched") for name in ("stored", "refetched")}
    stored = {name: stored_bytes(*pair, options.microbatches) for name, pair in made.items()}
    clock = time.perf_counter if setting.workers else time.process_time
    runs = {name: partial(seconds, *pair, options.microbatches, clock) for name, pair in made.items()}
    found = alternate(runs, options.rounds)
    own = build(setting, options.width, refetch=True)[1] if setting.workers == 0 else None
    fetch = min(_fetch_seconds(own, m) for m in range(9)) if own is not None else None
    ratios = ratio(found["refetched"], found["stored"])
    rows = {name: spread([1e3 * value for value in values]) for name, values in found.items()}
    single = "" if fetch is None else f"; one microbatch is fetched in {1e3 * fetch:.2f} ms of CPU time"
    print(f"\n{setting.name}, batch {setting.batch}, {setting.workers} worker(s){single}")
    print(f"stage 1 stores {stored['stored'] / 1e6:.2f} MB, or {stored['refetched'] / 1e6:.2f} MB with refetching\n")
    print(table(rows, "ms per microbatch"))
    print(f"\nrefetched / stored, by round: {ratios['min']:.3f} to {ratios['max']:.3f}, median {ratios['median']:.3f}")
    return {**setting._asdict(), "dataset": setting.dataset.name, "stored_bytes": stored, "fetch_seconds": fetch, "seconds": found}


def _fetch_seconds(source: TrainSource, m: int) -> float:
    start = time.process_time()
    source.refetch(m)
    return time.process_time() - start


def main() -> None:
    parser = benchmark_parser(__doc__, 7)
    parser.add_argument("--width", type=float, default=0.25, help="width of RevNet-18")
    parser.add_argument("--batch", type=int, default=64, help="images of 32x32 pixels per microbatch")
    parser.add_argument("--jpegs", type=int, default=16, help="JPEG files per microbatch, decoded at 224x224")
    parser.add_argument("--microbatches", type=int, default=24, help="microbatches of a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arrays = load_dataset("synthetic", images=16 * options.batch)
    with tempfile.TemporaryDirectory() as folder:
        files = jpeg_files(Path(folder))
        settings = [
            Setting("32x32 in memory, crop and flip", arrays, options.batch, 0),
            *(Setting("JPEG, random crop at 224x224", files, options.jpegs, workers) for workers in (0, 1)),
        ]
        print(f"RevNet-18, width {options.width}, {len(revnet18().blocks)} stages in one process, one thread")
        found = [measure(setting, options) for setting in settings]
    save(options.out, {"machine": machine(), "settings": found})


if __name__ == "__main__":
    main()
