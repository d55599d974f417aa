"""Memory of reversible language models whose optimizer state two replicas divide: predicted, and used by four processes.

python -m benchmarks.memory_check [--sizes 15 135] [--tokens 64] [--weights bf16]

PETRA trains two stages with AdamW. Prints MB (10^6 bytes) of each stage: predicted, and for each replica the most bytes of live
tensors and what the peak of resident memory grows by after the imports.
"""

import argparse
from typing import Literal

import torch
import torch._dynamo  # torch imports it (70 MB) when the first optimizer is made

from benchmarks.report import in_processes, machine, peak_mib
from benchmarks.two_stages import Zeros
from petra import Numerics, Pipeline, Recipe, TensorSpec, UpdateRules
from petra.cost_model.memory import predict_memory
from petra.cost_model.stage_memory import LiveBytes
from petra.models import revgpt
from petra.plan import make_plan
from petra.training import OPTIMIZERS

SIZES = {15: (1_024, 384, 8, 6), 135: (8_192, 640, 24, 10)}
"""Tokens of the vocabulary, width, layers and heads of each number of millions of parameters."""


def measured(rank: int, size: int, tokens: int, weights: Literal["float32", "bf16"]) -> tuple[float, float, float]:
    """Return the MB of this process: predicted, live, resident."""
    model, inputs = revgpt(*SIZES[size], size=tokens), TensorSpec((2, tokens), torch.int64)
    recipe = Recipe(OPTIMIZERS["adamw"], lambda t: 1e-4, rules=UpdateRules(shard=True, weights=weights))
    numerics = Numerics(autocast=torch.bfloat16 if weights == "bf16" else None)
    with LiveBytes() as live:
        resident = peak_mib(lambda: Pipeline(model, inputs, recipe, stages=2, dp=2, k=2, numerics=numerics).train(Zeros(inputs), 8))
    plan = make_plan(model, inputs, method="petra", stages=2, processes=4, dp=2, k=2, numerics=numerics)
    memory = predict_memory(plan, recipe, TensorSpec((tokens,), torch.int64))[plan.layout.locate(rank)[1]]
    return memory.tensors / 1e6, live.most / 1e6, resident * 2**20 / 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[*SIZES], choices=SIZES)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--weights", choices=("float32", "bf16"), default="float32", help="bf16 with autocast and float32 masters")
    options = parser.parse_args()
    print(machine(), "| million parameters | stage | predicted | live | resident |", "|---|---|---|---|---|", sep="\n")
    for size in options.sizes:
        found = in_processes(4, measured, size, options.tokens, options.weights)
        for stage in (0, 1):
            one, two = found[stage], found[stage + 2]
            print(f"| {size} | {stage + 1} | {one[0]:.1f} | {one[1]:.1f}, {two[1]:.1f} | {one[2]:.0f}, {two[2]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
