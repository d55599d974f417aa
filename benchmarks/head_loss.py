"""Memory and time of the loss of a language model's head, with whole logits and in chunks of rows.

``python -m benchmarks.head_loss [--tokens 1024] [--dim 576] [--rows 64]``

Measures loss and gradients of hidden states and weight in float32, each case in a process of its own: what the peak of the resident
memory grows by over that of hidden states and weight, in MB (10^6 bytes). The gradients are part of it.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from resource import RUSAGE_SELF, getrusage

import torch
from torch.nn import functional as F

from petra.models.head_loss import LinearCrossEntropy

CASES = {"whole logits": None, "chunks": 0.0, "chunks, smoothed labels": 0.1}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 1024), ("dim", 576), ("rows", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    print("| vocabulary | loss | MB | seconds |", "|---|---|---|---|", sep="\n")
    for classes in (49_152, 128_256):
        for case in CASES:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found = pool.submit(measured, case, classes, options.tokens, options.dim, options.rows).result()
            print(f"| {classes} | {case} | {found[0]:.0f} | {found[1]:.1f} |", flush=True)


def measured(case: str, classes: int, tokens: int, dim: int, rows: int) -> tuple[float, float]:
    """Return the growth of the peak of the resident memory in MB, and the seconds."""
    hidden, weight = torch.randn(tokens, dim, requires_grad=True), torch.full((classes, dim), 0.01, requires_grad=True)
    targets, smoothing = torch.zeros(tokens, dtype=torch.int64), CASES[case]
    before, started = getrusage(RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if smoothing is None:
        loss = F.cross_entropy(F.linear(hidden, weight), targets)
    else:
        loss = LinearCrossEntropy(smoothing, rows)(hidden, weight, targets)
    torch.autograd.grad(loss, [hidden, weight])
    return (getrusage(RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6, time.perf_counter() - started


if __name__ == "__main__":
    main()
