"""Compare forward beside backward, in two threads, with forward and backward in turn on one and on two compute threads.

All stages run in one process. PETRA's period is then the sum of all stages' times: F + B in turn, and the larger of all F (and the
last stage's B) and all other B side by side.

python -m benchmarks.overlap --out runs/overlap.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.one_process import model_parser, pipelined
from benchmarks.report import alternate, machine, ratio, save, spread, table
from benchmarks.two_stages import Noise, sgd
from petra import METHODS, Pipeline, TensorSpec
from petra.cost_model.autotune import tune
from petra.cost_model.costs import profile_blocks
from petra.cost_model.simulator import predict
from petra.models import MODELS
from petra.settings import Numerics, Runtime


def main() -> None:
    parser = model_parser(__doc__)
    parser.set_defaults(rounds=3, microbatches=9)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 instead of float32")
    options = parser.parse_args()

    model, autocast = MODELS[options.model](10, width=options.width), torch.bfloat16 if options.bf16 else None
    inputs, method = TensorSpec((options.batch, 3, 32, 32), torch.float32), METHODS["petra"]
    data, numerics = Noise(inputs), Numerics(autocast=autocast, channels_last=True)
    torch.set_num_threads(1)
    contestants: dict[str, Callable[[], float]] = {}
    for name, overlap, threads in (
        ("in turn, 1 thread", False, 1),
        ("in turn, 2 compute threads", False, 2),
        ("side by side, 2 threads", True, 1),
    ):
        runtime = Runtime(overlap=overlap)
        pipeline = Pipeline(model, inputs, method=method, k=options.k, optimizer=sgd, numerics=numerics, runtime=runtime)
        contestants[name] = partial(pipelined, pipeline, data, options.microbatches, threads)
    seconds = alternate(contestants, options.rounds)
    base = seconds["in turn, 1 thread"]
    faster = {name: ratio(base, values) for name, values in seconds.items()}
    blocks = profile_blocks(model, inputs, optimizer=sgd, autocast=autocast, channels_last=True)
    costs = tune(blocks, method, options.k, len(blocks)).costs
    turns, beside = (
        predict(costs, method, options.k, processes=[range(len(costs))], overlap=overlap).period for overlap in (False, True)
    )
    print(f"{options.model}, width {options.width}, batch {options.batch}, {len(blocks)} stages in one process\n")
    print(table({name: spread([options.batch / s for s in values]) for name, values in seconds.items()}, "images/s"))
    print("\nSpeed divided by that of one thread, round by round:\n\n" + table(faster, ""))
    print(f"\nPredicted from the blocks' times, side by side: {turns / beside:.2f}")
    save(
        options.out,
        {"machine": machine(), "options": vars(options), "seconds": seconds, "faster": faster, "predicted": turns / beside},
    )


if __name__ == "__main__":
    main()
