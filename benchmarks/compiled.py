"""Compare training in one process with and without trainer.compile=inductor, on the CPU in bf16.

python -m benchmarks.compiled --out runs/compiled.json

The first microbatches compile and are not measured; that takes minutes. CPU time of one thread.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from benchmarks.report import alternate, benchmark_parser, machine, ratios, save, spreads, table
from benchmarks.two_stages import Noise, sgd
from petra import Model, Pipeline, Recipe, TensorSpec
from petra.models import revgpt, revnet18
from petra.process_memory import keep_freed_memory
from petra.settings import Numerics, Runtime

MODELS = {
    "RevNet-18, quarter width, 64 images": (partial(revnet18, width=0.25), TensorSpec((64, 3, 32, 32), torch.float32), 64),
    "GPT, 256 channels, 3 layers, 4 x 128 tokens": (
        partial(revgpt, dim=256, depth=3, heads=4, size=128, norm="rmsnorm", mlp="swiglu", positions="rotary"),
        TensorSpec((4, 128), torch.int64),
        512,
    ),
}
"""Model, its input, and targets per microbatch."""
BACKENDS = {"eager": None, "inductor": "inductor"}


def seconds(pipeline: Pipeline, data: Noise, microbatches: int) -> float:
    """Return the CPU time per microbatch."""
    start = time.process_time()
    pipeline.train(data, microbatches)
    return (time.process_time() - start) / microbatches


def build(model: Model, inputs: TensorSpec, backend: str | None) -> Pipeline:
    numerics, runtime = Numerics(autocast=torch.bfloat16, channels_last=True), Runtime(compile=backend)
    return Pipeline(model, inputs, Recipe(sgd), method="petra", k=8, numerics=numerics, runtime=runtime)


def main() -> None:
    parser = benchmark_parser(__doc__, 5)
    parser.add_argument("--microbatches", type=int, default=24, help="microbatches of one round of one contestant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    figures = {}
    for name, (model, inputs, targets) in MODELS.items():
        data = Noise(inputs, targets)
        pipelines = {kind: build(model(), inputs, backend) for kind, backend in BACKENDS.items()}
        runs = {kind: partial(seconds, pipeline, data, options.microbatches) for kind, pipeline in pipelines.items()}
        for run in runs.values():
            run()  # compiles
        figures[name] = alternate(runs, options.rounds)
    cost = ratios(figures, "inductor", "eager")
    print("PETRA, k = 8, bf16, one thread\n\n" + table(spreads(figures), "s of CPU time per microbatch"))
    print("\nInductor over eager, round by round:\n\n" + table(cost, ""))
    save(options.out, {"machine": machine(), "options": vars(options), "figures": figures, "inductor": cost})


if __name__ == "__main__":
    main()
