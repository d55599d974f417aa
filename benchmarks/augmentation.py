"""Measure data preparation on one core, in images per second: crop and flip in memory, and decoding of JPEG files.

python -m benchmarks.augmentation --out runs/augmentation.json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.report import alternate, benchmark_parser, machine, save, spread, table
from petra.data import Dataset, TrainSource, load_dataset

SIDE = 400
"""Shorter side of the JPEG images in pixels, about the average of ImageNet."""


def seconds(inputs: Callable[[int], Tensor], microbatches: int) -> float:
    """Return the CPU time of this process for reading microbatches, in seconds. Other processes hardly affect it."""
    start = time.process_time()
    for m in range(microbatches):
        inputs(m)
    return time.process_time() - start


def jpeg_files(folder: Path) -> Dataset:
    """Write 128 JPEG files of smooth noise, 500x400 pixels, and return them as a data set of two classes."""
    rng = np.random.default_rng(0)
    for i in range(128):
        path = folder / ("train", "val")[i % 2] / f"class{i // 2 % 2}" / f"{i}.jpeg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(rng.integers(0, 256, (SIDE // 8, SIDE * 5 // 32, 3), dtype=np.uint8))
        noise.resize((SIDE * 5 // 4, SIDE), Image.Resampling.BICUBIC).save(path, quality=90)
    return load_dataset("imagenet", root=folder, size=224)


def main() -> None:
    parser = benchmark_parser(__doc__, 9)
    parser.add_argument("--batch", type=int, default=64, help="images per microbatch")
    parser.add_argument("--microbatches", type=int, default=100, help="microbatches of images in memory per round")
    options = parser.parse_args()
    torch.set_num_threads(1)

    arrays = load_dataset("synthetic", images=50_000)
    with tempfile.TemporaryDirectory() as folder:
        files = jpeg_files(Path(folder))
        sources = {
            "32x32 in memory, crop and flip": (TrainSource(arrays, options.batch, seed=0), options.microbatches),
            "32x32 in memory, not augmented": (
                TrainSource(arrays, options.batch, seed=0, augment=False),
                options.microbatches,
            ),
            "JPEG, random crop at 224x224": (TrainSource(files, 32, seed=0), 1),
            "JPEG, centre crop at 224x224": (TrainSource(files, 32, seed=0, augment=False), 1),
        }
        measured = alternate({name: partial(seconds, source.inputs, n) for name, (source, n) in sources.items()}, options.rounds)
    sizes = {name: n * (32 if "JPEG" in name else options.batch) for name, (_, n) in sources.items()}
    speeds = {name: spread([sizes[name] / value for value in values]) for name, values in measured.items()}
    print(f"one thread, batch {options.batch} (JPEG: 32), all normalised to float32\n")
    print(table(speeds, "images/s"))
    save(options.out, {"machine": machine(), "images": sizes, "seconds": measured, "images_per_second": speeds})


if __name__ == "__main__":
    main()
