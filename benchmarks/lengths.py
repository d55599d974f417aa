"""Measure the time that sequences of several lengths save: revgpt_1m on one core, with and without the remedy.

python -m benchmarks.lengths --out runs/lengths.json

The clock is CPU time, which depends less on other work on the machine.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.report import alternate, benchmark_parser, ratios, save, spreads, table
from benchmarks.two_stages import Zeros
from examples.remedies.lengths import Lengths
from petra import Pipeline, Recipe, TensorSpec
from petra.models import revgpt
from petra.training import OPTIMIZERS

CASES = {512: (128, 256, 512), 2048: (256, 512, 1024, 2048)}
"""Lengths of sequences, by the tokens of a microbatch."""
revgpt_1m = partial(
    revgpt, 1_024, 128, 4, 4, kv_heads=2, hidden=512, mlp="swiglu", norm="rmsnorm", bias=False, positions="rotary", qk_norm=True
)


class Contestant:
    """Trains four stages. Each call trains on 32,768 tokens and returns the seconds."""

    def __init__(self, tokens: int, lengths: Sequence[int]) -> None:
        recipe = Recipe(OPTIMIZERS["adamw"], lambda t: 1e-4, extensions=[Lengths((*lengths,))] if lengths else [])
        inputs = TensorSpec((1, tokens), torch.int64)
        self._pipeline = Pipeline(revgpt_1m(size=tokens), inputs, recipe, stages=4, k=16)
        self._data, self._microbatches = Zeros(inputs), 2**15 // tokens

    def __call__(self) -> float:
        start = time.process_time()
        self._pipeline.train(self._data, self._microbatches)
        return time.process_time() - start


def main() -> None:
    """Print the table."""
    options = benchmark_parser(__doc__, rounds=5).parse_args()
    torch.set_num_threads(1)
    figures = {}
    for tokens, lengths in CASES.items():
        contestants = {"one length": Contestant(tokens, ()), "several lengths": Contestant(tokens, lengths)}
        figures[f"{tokens} tokens"] = alternate(contestants, options.rounds)
    print(table(spreads(figures), "s"))
    print(table(ratios(figures, "several lengths", "one length"), "several / one"))
    save(options, {"seconds": figures})


if __name__ == "__main__":
    main()
