"""Compare training in one process: PETRA and plain PyTorch, both with torch's threads on all cores.

python -m benchmarks.one_process --out runs/one_process.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.report import alternate, benchmark_parser, machine, ratio, save, spread, table
from benchmarks.two_stages import Noise, sgd
from petra import METHODS, Keep, Method, Pipeline, Recipe, TensorSpec, Weights
from petra.diagnostics.process_memory import keep_freed_memory
from petra.models import MODELS
from petra.settings import Numerics

METHODS_HERE = {
    "petra": METHODS["petra"],
    "petra, graphs kept": Method("petra, graphs kept", 2, Keep.GRAPH, weights=Weights.STASHED),
    "reversible": METHODS["reversible"],
}


def pipelined(pipeline: Pipeline, data: Noise, microbatches: int, threads: int = 1) -> float:
    """Return the seconds per microbatch over whole updates while the pipeline is full."""
    torch.set_num_threads(threads)
    times: list[float] = []
    pipeline.train(data, microbatches + pipeline.plan.delays[0], on_microbatch=lambda _: times.append(time.perf_counter()))
    whole = (microbatches - 1) // pipeline.plan.k * pipeline.plan.k
    return (times[whole] - times[0]) / whole


def plain(
    network: nn.Module, optimizer: torch.optim.Optimizer, data: Noise, k: int, microbatches: int, autocast: bool, threads: int
) -> float:
    """Return the seconds per microbatch of ordinary training, which stores all activations."""
    torch.set_num_threads(threads)
    x = data.inputs(0).contiguous(memory_format=torch.channels_last)
    start = time.perf_counter()
    whole = (microbatches - 1) // k * k
    for m in range(whole):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = network(x)
        (F.cross_entropy(y.float(), data.targets(m)) / k).backward()
        if (m + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    return (time.perf_counter() - start) / whole


def main() -> None:
    parser = benchmark_parser(__doc__, 9)
    parser.add_argument("--model", default="revnet18", choices=MODELS, metavar="NAME", help="name of a model")
    parser.add_argument("--width", type=float, default=0.25, help="factor of the number of channels")
    parser.add_argument("--batch", type=int, default=64, help="images per microbatch")
    parser.add_argument("--k", type=int, default=4, help="microbatches per update")
    parser.add_argument("--microbatches", type=int, default=21, help="microbatches of one round of one contestant")
    parser.add_argument("--cores", type=int, default=2, help="threads of torch")
    parser.add_argument("--float32", action="store_true", help="compute in float32 instead of bf16")
    options = parser.parse_args()
    keep_freed_memory()  # as in training runs

    model = MODELS[options.model](10, width=options.width)
    inputs = TensorSpec((options.batch, 3, 32, 32), torch.float32)
    data = Noise(inputs)
    contestants: dict[str, Callable[[], float]] = {}
    torch.set_num_threads(1)
    for name, method in METHODS_HERE.items():
        pipeline = Pipeline(
            model,
            inputs,
            Recipe(sgd),
            method=method,
            k=options.k,
            numerics=Numerics(autocast=None if options.float32 else torch.bfloat16, channels_last=True),
        )
        contestants[name] = partial(pipelined, pipeline, data, options.microbatches, options.cores)
    network = model.build(0).to(memory_format=torch.channels_last)
    train = partial(plain, network, sgd(network), data, options.k, options.microbatches, not options.float32)
    contestants["plain PyTorch"] = partial(train, options.cores)
    contestants["plain PyTorch, one core"] = partial(train, 1)
    seconds = alternate(contestants, options.rounds)
    faster = {name: ratio(seconds["plain PyTorch"], seconds[name]) for name in METHODS_HERE}
    precision = "float32" if options.float32 else "bf16"
    print(f"{options.model}, width {options.width}, batch {options.batch}, {precision}, {options.cores} cores\n")
    print(table({name: spread([options.batch / s for s in values]) for name, values in seconds.items()}, "images/s"))
    print("\nImages/s divided by those of plain PyTorch, round by round:\n\n" + table(faster, ""))
    save(options.out, {"machine": machine(), "options": vars(options), "seconds": seconds, "over_plain": faster})


if __name__ == "__main__":
    main()
