"""Memory of DeepLabV3 at the sizes of Cityscapes and Mapillary Vistas, and the largest crop that fits, by dry run.

``python -m benchmarks.segmentation_memory [--body wide_resnet38] [--data cityscapes] [--crops 4] [--size 512] [--stages 1]
[--method backprop] [--k 1] [--fit 16 40 80]``

For batch norm and InPlace-ABN, prints the predicted memory of each process (one stage each) in GB, with float32, SGD with momentum
and online bootstrapping, and for each limit the largest square crop whose memory fits in every process. Needs neither a GPU nor the
memory that it predicts. Memory is about linear in the number of pixels, so two sizes give a guess, which is then predicted itself.
"""

from __future__ import annotations

import argparse
from functools import partial
from math import sqrt

import torch
from torch.nn import functional as F

from petra.cost_model.memory import predict_memory
from petra.engine.endpoints import Losses
from petra.engine.metrics import correct_predictions
from petra.engine.recipe import Recipe
from petra.inplace_abn import ConfusionMatrix, bootstrapped_cross_entropy, deeplabv3
from petra.plan import make_plan
from petra.settings import Numerics
from petra.specs import TensorSpec
from petra.training import sgd

CLASSES = {"cityscapes": 19, "vistas": 65}
STEP = 8
"""Crops are multiples of the output stride."""


def main() -> None:
    """Print the tables."""
    options = parsed()
    print("| normalisation | crop | predicted GB per process |", "|---|---|---|", sep="\n")
    for norm in ("batchnorm", "inplace_abn"):
        known = {options.size: predicted(options, norm, options.size)}
        show(norm, options.size, known[options.size])
        if options.fit:
            known[options.size + 64] = predicted(options, norm, options.size + 64)
        for limit in options.fit:
            size = largest(known, limit)
            while size > 0 and max(predicted(options, norm, size)) > limit:
                size -= STEP
            show(f"{norm}, largest for {limit:g} GB", size, predicted(options, norm, size) if size > 0 else [])


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body", default="wide_resnet38")
    parser.add_argument("--data", default="cityscapes", choices=CLASSES)
    parser.add_argument("--crops", type=int, default=4, help="crops per microbatch and replica")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--method", default="backprop")
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--fit", type=float, nargs="*", default=[])
    return parser.parse_args()


def predicted(options: argparse.Namespace, norm: str, size: int) -> list[float]:
    """Return the predicted memory of each process in GB (10^9 bytes)."""
    classes = CLASSES[options.data]
    model = deeplabv3(classes, options.body, norm=norm, activation="leaky_relu")
    inputs = TensorSpec((options.crops, 3, size, size), torch.float32)
    metrics = {"accuracy": correct_predictions, "miou": ConfusionMatrix(classes)}
    plan = make_plan(
        model,
        inputs,
        method=options.method,
        k=options.k,
        stages=options.stages,
        processes=options.stages,
        numerics=Numerics(channels_last=True),
        metrics=1 + classes**2,
    )
    losses = Losses(partial(bootstrapped_cross_entropy, fraction=0.25), F.cross_entropy)
    recipe = Recipe(sgd, lambda t: 1e-3, losses, metrics)
    targets = TensorSpec((options.crops, size, size), torch.int64)
    return [memory.total / 1e9 for memory in predict_memory(plan, recipe, targets)]


def largest(known: dict[int, list[float]], limit: float) -> int:
    """Return the largest crop that should fit, by linear extrapolation in pixels from two known sizes."""
    (small, first), (large, second) = known.items()
    sides = []
    for a, b in zip(first, second, strict=True):
        per_pixel = (b - a) / (large**2 - small**2)
        sides.append(sqrt(max(0.0, small**2 + (limit - a) / per_pixel)))
    return int(min(sides)) // STEP * STEP


def show(label: str, size: int, memory: list[float]) -> None:
    """Print a row."""
    print(f"| {label} | {size} | {', '.join(f'{value:.1f}' for value in memory)} |", flush=True)


if __name__ == "__main__":
    main()
