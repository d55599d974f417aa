"""Measure what ``cluster.elastic=true`` costs while no replica is lost: at each update of a stage, and at each drain.

python -m benchmarks.elastic --out runs/elastic.json

Two replicas of one process each train RevNet-18 in ten stages, in turns without and with the agreement on lost replicas. With
k = 1, every backward pass of a stage ends in an update, so the agreement costs the difference per stage and microbatch. With it, an
all-reduce works on a copy of the gradients. At a drain, all processes agree once more whether the replicas have changed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.report import alternate, benchmark_parser, in_processes, machine, ratio, save, spread, table, timed
from benchmarks.two_stages import Noise, sgd
from petra import Pipeline, TensorSpec, make_plan
from petra.elastic.liveness import Liveness
from petra.elastic.membership import Membership
from petra.elastic.replicas import ElasticReplicas
from petra.engine.recipe import Recipe
from petra.models import revnet18

REPLICAS, DRAINS = 2, 20


def measure(rank: int, port: int, rounds: int, microbatches: int, width: float, batch: int) -> dict[str, list[float]]:
    """Return the seconds per update of a stage, and per agreement at a drain."""
    membership = Membership(rank, REPLICAS, Liveness("127.0.0.1", port, "run", f"replica {rank}", 0, 1, 60))
    membership.join()
    inputs = TensorSpec((REPLICAS * batch, 3, 32, 32), torch.float32)
    plan = make_plan(revnet18(10, width), inputs, method="petra", k=1, processes=REPLICAS, dp=REPLICAS, metrics=0)
    recipe = Recipe(sgd, lambda t: 0.01, metrics={})
    pipelines = {
        "plain": Pipeline.from_plan(plan, recipe),
        "elastic": Pipeline.from_plan(plan, recipe, replicas=ElasticReplicas(plan.layout, torch.device("cpu"), membership)),
    }
    data, updates, drains = Noise(inputs), microbatches * len(plan.stages), iter(range(10**6))

    def drain() -> float:
        return timed(lambda: [membership.conclude(f"drain {next(drains)}") for _ in range(DRAINS)]) / DRAINS

    def update(name: str) -> Callable[[], float]:
        return lambda: timed(lambda: pipelines[name].train(data, microbatches)) / updates

    return alternate({**{name: update(name) for name in pipelines}, "drain": drain}, rounds)


def main() -> None:
    parser = benchmark_parser(__doc__, 9)
    parser.add_argument("--width", type=float, default=0.0625, help="multiple of the network's width")
    parser.add_argument("--batch", type=int, default=4, help="images per microbatch and replica")
    parser.add_argument("--microbatches", type=int, default=20, help="microbatches of each round")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = in_processes(REPLICAS, measure, store.port, options.rounds, options.microbatches, options.width, options.batch)[0]
    found["agreement"] = [with_ - without for with_, without in zip(found["elastic"], found["plain"], strict=True)]
    rows = {name: spread([1e3 * value for value in values]) for name, values in found.items()}
    print(table(rows, "ms"))
    print(f"\nelastic / plain: {ratio(found['elastic'], found['plain'])['median']:.2f}")
    save(options.out, {"machine": machine(), "options": vars(options), "seconds": found})


if __name__ == "__main__":
    main()
