"""Time to a loss, and memory: ``python -m benchmarks.staleness.costs RECORDS [--measure] [--time PICTURE] [--memory PICTURE]``.

Training losses come from the records, the time of an update from the cost model: a decoder of width 4096 with one layer per device,
in bf16, on devices of 60 TFLOP/s. Nothing ran on such devices. ``--measure`` measures how fast the benchmark's own layer computes
at each size of a microbatch and writes it to ``staleness_efficiency.json`` among the records, which determines how fast the devices
are at that size.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import RECORDS
from benchmarks.report import machine
from benchmarks.staleness.cells import WINDOW, WINDOWS, Cell
from benchmarks.staleness.figures import Records, final_runs, read_all
from launch.plan import predict_method
from petra import Model, Numerics, Recipe, TensorSpec
from petra.analysis.plots import Panel, grid, own_settings, save
from petra.cost_model.costs import BlockCost, count_blocks, profile_blocks
from petra.cost_model.event_graph import PREDICTED, ZB_H1, TransportRules
from petra.cost_model.machines import Connection, Link, Machines
from petra.cost_model.memory import predict_memory
from petra.models import gpt, revgpt
from petra.plan import make_plan
from petra.training import write_json

FLOPS, LATENCY = 60e12, 20e-6
"""Floating-point operations per second of a device at the best size of a microbatch, and seconds until a message's first byte."""
WIDTH, HEADS, HIDDEN, TOKENS, CLASSES = 4096, 32, 11_008, 2048, 32_000
"""Shape of the decoder, tokens of a window, and tokens of the vocabulary. An update has as many windows as in the benchmark."""
NVLINK = 450e9
"""Bytes per second of NVLink in one direction, as of the other links."""
LINKS = {
    "1 Gb/s": (0.125e9, 1),
    "10 Gb/s": (1.25e9, 1),
    "100 Gb/s": (12.5e9, 1),
    "NVLink": (NVLINK, 1),
    "NVLink in nodes of 8, 10 Gb/s between": (1.25e9, 8),
}
"""Bytes per second between nodes, and devices of a node, within which the links are NVLink."""
BANDWIDTHS = tuple(0.125e9 * 2 ** (i / 2) for i in range(24))
"""Equal links at which methods are compared: 1 to 2,896 Gb/s, with a factor of the square root of 2 between neighbours."""
SMOOTH = 16
"""Updates over which the training loss is averaged."""
NUMERICS = Numerics(torch.bfloat16, message_format="bf16")
ITERATIONS = 5
"""Newton-Schulz iterations of Muon. Updates of the other optimizers take no time here."""
EFFICIENCY = RECORDS / "staleness_efficiency.json"
FLUSHES = ("gpipe", "1f1b", ZB_H1.name)
"""Schedules that train like backpropagation, with any number of microbatches per update. ZB-H1 is predicted only."""
SIZES = (32, 16, 8, 4)
"""Microbatches per update. A schedule that flushes takes the fastest."""
STAGES = (8, 16, 32)
REPLICAS = 2
"""Replicas of the longest pipeline in the extrapolated case."""


@dataclass(frozen=True)
class Way:
    """A schedule, with the losses of the cell that trains like it.

    Attributes:
        name: Name in tables and figures.
        schedule: Key of :data:`petra.cost_model.event_graph.PREDICTED`.
        ks: Microbatches per update, of which the fastest is taken.
        model: ``revgpt`` or ``gpt``.
        optimizer: Key of :data:`benchmarks.staleness.cells.OPTIONS`.
        delay: Boundary delay other than the schedule's own, or None.
        curve: Training loss in nats per token of each update: mean over the seeds, then over :data:`SMOOTH` updates.
    """

    name: str
    schedule: str
    ks: tuple[int, ...]
    model: str
    optimizer: str
    delay: int | None
    curve: tuple[float, ...]


def measure() -> dict[str, Any]:
    """Return windows per second of forward and backward of one layer of the benchmark, by the windows of a microbatch."""
    torch.set_num_threads(1)
    layer = Model("layer", Cell("petra").make_model().blocks[:2])
    found = dict[str, int]()
    for size in (WINDOWS // k for k in SIZES):
        inputs = TensorSpec((size, WINDOW), torch.int64)
        cost = profile_blocks(layer, inputs, optimizer=lambda block: torch.optim.SGD(block.parameters(), lr=0.0), rounds=101)[1]
        found[str(size)] = round(size / (cost.graph_forward + cost.graph_backward))
    return {"windows_per_second": found, "machine": machine()}


def speed(size: int) -> float:
    """Return how fast a device computes with microbatches of ``size`` windows, relative to the best size."""
    found = json.loads(EFFICIENCY.read_text(encoding="utf-8"))["windows_per_second"]
    return float(found[str(size)] / max(found.values()))


@cache
def decoder(model: str, stages: int) -> Model:
    """Return the decoder whose time is predicted: stem, one layer for each other stage, and head."""
    return (revgpt if model == "revgpt" else gpt)(
        CLASSES, WIDTH, stages - 2, HEADS, size=TOKENS, hidden=HIDDEN, mlp="swiglu", norm="rmsnorm", bias=False, positions="rotary"
    )


@cache
def block_costs(model: str, stages: int, size: int, optimizer: str) -> Sequence[BlockCost]:
    """Return the costs of the decoder's blocks in seconds, for microbatches of ``size`` windows."""
    counted = count_blocks(decoder(model, stages), TensorSpec((size, TOKENS), torch.int64), NUMERICS)
    found = [block.scaled(1 / speed(size)) for block in counted]
    if optimizer == "muon":
        shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, HIDDEN)] * 3
        flops = float(ITERATIONS * sum(4 * m * m * n + 2 * m**3 for m, n in shapes))
        found[1:-1] = [replace(block, update=flops) for block in found[1:-1]]
    return [block.scaled(1 / FLOPS) for block in found]


def machines_of(stages: int, bandwidth: float, node: int = 1) -> Machines:
    """Return equal devices, with links of ``bandwidth`` between nodes of ``node`` devices and NVLink within them."""
    links = [Link(NVLINK if i % node else bandwidth, LATENCY) for i in range(1, stages)]
    return replace(Machines.equal(stages), connections=tuple(Connection(link, link) for link in links))


@cache
def update_seconds(way: Way, stages: int, bandwidth: float, node: int = 1, transport: TransportRules = "edge") -> float:
    """Return the seconds of an update, with the fastest of the way's numbers of microbatches.

    Messages of the transport ``edge`` travel as soon as they are ready. With ``lockstep``, petra's transport on GPUs, the
    neighbours of a stage wait while it updates its weights.
    """
    method = PREDICTED[way.schedule] if way.delay is None else replace(PREDICTED[way.schedule], delay=way.delay)

    def seconds(k: int) -> float:
        costs = block_costs(way.model, stages, WINDOWS // k, way.optimizer)
        return k * predict_method(costs, method, k, machines_of(stages, bandwidth, node), transport).prediction.period

    return min(map(seconds, way.ks))


def replica_seconds(way: Way, stages: int, bandwidth: float, node: int) -> float:
    """Return the seconds per update's worth of tokens with :data:`REPLICAS` replicas, whose updates have as many times the tokens.

    Each replica computes as without the others. Then, the gradients of a stage are added in float32, over a link of the same speed.
    """
    profiles = decoder(way.model, stages).profile(TensorSpec((1, TOKENS), torch.int64))
    nbytes = 4 * max(profile.parameters for profile in profiles)
    return (update_seconds(way, stages, bandwidth, node) + 2 * (REPLICAS - 1) / REPLICAS * nbytes / bandwidth) / REPLICAS


def ways(records: Records, stages: int, optimizer: str, remedies: bool = True) -> list[Way]:
    """Return the ways to train with a number of stages and an optimizer whose cells have final runs.

    Each method has the k and, with ``remedies``, the remedy with which its training loss ends lowest; with Muon a k of at most 16:
    k = 32 takes about as many updates, and each takes half as long again, as a microbatch is a single window. A method with d = 2
    makes the same updates with d = 1 and microbatches twice as large, which is another way with the same losses. Cells that store
    graphs are left out, as the times are those of methods that recompute. PipeDream-2BW that keeps nothing has the inputs of the
    one that stores them, but for rounding, so it stands for it.
    """
    found: dict[str, Way] = {}
    for cell, runs in records.items():
        setting, final = runs[0]["setting"], final_runs(runs)
        own = (setting["stages"], setting["optimizer"]) == (stages, optimizer) and setting["model"] in ("revgpt", "gpt")
        own = own and (optimizer, setting["k"]) != ("muon", 32) and setting.get("keep") != "graph"
        if not final or not own or "_d1_" in cell or not (remedies or setting["remedy"] == "none"):
            continue
        means = [statistics.fmean(losses) for losses in zip(*(run["curve"] for run in final), strict=True)]
        curve = tuple(statistics.fmean(means[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(means)))
        method, k, model = setting["method"], setting["k"], setting["model"]
        if method == "backprop":
            name = {schedule: f"{schedule}, {model}" for schedule in FLUSHES}
            found |= {name[schedule]: Way(name[schedule], schedule, SIZES, model, optimizer, None, curve) for schedule in FLUSHES}
            continue
        remedy = "" if setting["remedy"] == "none" else f", {setting['remedy']}"
        half = [(f"{method}, d = 1", k // 2, 1)] if PREDICTED[method].delay == 2 and k // 2 in SIZES else []
        for key, own_k, delay in [(method, k, None), *half]:
            if key not in found or curve[-1] < found[key].curve[-1]:
                found[key] = Way(f"{key}, k = {own_k}{remedy}", method, (own_k,), model, optimizer, delay, curve)
    return list(found.values())


def updates_until(curve: Sequence[float], loss: float) -> int:
    """Return the number of updates after which the loss of ``curve`` is at most ``loss`` for the first time."""
    return next(i for i, value in enumerate(curve, 1) if i >= SMOOTH and value <= loss)


def common_loss(found: Sequence[Way]) -> float:
    """Return the smallest loss that all ways reach."""
    return max(min(way.curve[SMOOTH - 1 :]) for way in found)


def times(found: Sequence[Way], stages: int, transport: TransportRules = "edge") -> str:
    """Return a Markdown table of the hours until the loss that all ways reach, by link."""
    loss = common_loss(found)
    wide = stages == max(STAGES)
    links = {name: link for name, link in LINKS.items() if link[1] < stages}
    names = [*links, *(f"{name}, {REPLICAS} replicas" for name in links if wide)]
    lines = [f"| J = {stages}, until {loss:.3f} nats per token | updates | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for way in found:
        count = updates_until(way.curve, loss)
        seconds = [update_seconds(way, stages, *link, transport=transport) for link in links.values()]
        seconds += [replica_seconds(way, stages, *link) for link in links.values() if wide]
        lines.append(f"| {way.name} | {count} | {' | '.join(f'{count * each / 3600:.3f}' for each in seconds)} |")
    return "\n".join(lines)


def faster(found: Sequence[Way], stages: int, transport: TransportRules = "edge") -> str:
    """Return a Markdown table of the :data:`BANDWIDTHS` at which PETRA is faster than each other way, and a way is the fastest."""
    loss = common_loss(found)
    hours = {
        way.name: [updates_until(way.curve, loss) * update_seconds(way, stages, each, transport=transport) for each in BANDWIDTHS]
        for way in found
    }
    petra, others = ([way.name for way in found if (way.schedule == "petra") == own] for own in (True, False))
    wins = {pair: [mine < theirs for mine, theirs in zip(*map(hours.get, pair), strict=True)] for pair in product(petra, others)}
    near = {name: [x <= 1.001 * min(rest) for x, *rest in zip(own, *hours.values(), strict=True)] for name, own in hours.items()}
    wins |= {(name, "all others, or as fast"): won for name, won in near.items() if any(won)}
    lines = ["| faster | than | at Gb/s |", "|---|---|---|"]
    for (own, other), won in wins.items():
        runs = [list(run) for each, run in groupby(range(len(won)), won.__getitem__) if each]
        ranges = [" to ".join(dict.fromkeys(f"{BANDWIDTHS[i] * 8e-9:,.4g}" for i in (run[0], run[-1]))) for run in runs]
        lines.append(f"| {own} | {other} | {'all' if all(won) else '; '.join(ranges) or 'none'} |")
    return "\n".join(lines)


def stage_memory(method: str, model: str, stages: int, k: int) -> list[float]:
    """Return the peak bytes of each stage, with AdamW and microbatches of the benchmark's windows / k."""
    inputs, size = TensorSpec((WINDOWS // k, TOKENS), torch.int64), WINDOWS // k
    plan = make_plan(decoder(model, stages), inputs, method=method, k=k, processes=stages, stages=stages, numerics=NUMERICS)
    recipe = Recipe(lambda stage: torch.optim.AdamW(stage.parameters()))
    return [memory.tensors for memory in predict_memory(plan, recipe, TensorSpec((size * TOKENS,), torch.int64))]


def memories(stages: int, k: int) -> dict[str, list[float]]:
    """Return the peak bytes of each stage of the methods that the page compares, by their name and their network."""
    compared = {"petra": "revgpt", "dsp": "gpt", "delayed": "gpt", "pipedream_2bw": "gpt", "1f1b": "gpt", "gpipe": "gpt"}
    return {f"{method}, {model}": stage_memory(method, model, stages, k) for method, model in compared.items()}


@own_settings()
def draw_times(records: Records, path: Path) -> None:
    """Draw the hours until the loss that all ways reach against the bandwidth, a panel for each number of stages and optimizer."""
    from matplotlib.figure import Figure

    panels = {each: found for each in product(STAGES, ("adamw", "muon")) if len(found := ways(records, *each)) > len(FLUSHES)}
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12, 5 * rows), layout="constrained")
    places = figure.subplots(rows, 2, squeeze=False).flat
    for axes, ((stages, optimizer), found) in zip(places, panels.items(), strict=False):
        loss, bandwidths = common_loss(found), BANDWIDTHS[::3]
        for way in found:
            hours = [updates_until(way.curve, loss) * update_seconds(way, stages, each) / 3600 for each in bandwidths]
            style = ("--" if way.model == "revgpt" else ":") if way.schedule in FLUSHES else "-"
            axes.loglog([each * 8e-9 for each in bandwidths], hours, style, marker=".", label=way.name)
        axes.set(
            title=f"{stages} devices, {optimizer}, until {loss:.2f} nats per token",
            xlabel="link (Gb/s)",
            ylabel="hours (predicted)",
        )
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="x-small")
    for axes in places:
        axes.remove()
    figure.savefig(path)


def draw_memory(found: dict[str, list[float]], path: Path) -> None:
    """Draw the peak bytes of each stage."""
    lines = {name: [(stage, size / 1e9) for stage, size in enumerate(sizes, 1)] for name, sizes in found.items()}
    save(grid([Panel("stage", "peak memory (GB, predicted)", lines)], columns=1), path)


def main() -> None:
    """Print the tables, and draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder or file of the records")
    parser.add_argument("--measure", action="store_true", help="measure the efficiency of small microbatches on this machine")
    parser.add_argument("--time", type=Path, help="file of the picture of times, .png or .svg")
    parser.add_argument("--memory", type=Path, help="file of the picture of memory, .png or .svg")
    parser.add_argument("--transport", choices=("edge", "lockstep"), default="edge", help="rules of messages in tables of times")
    parser.add_argument("--no-remedies", dest="remedies", action="store_false", help="compare methods without remedies")
    options = parser.parse_args()
    if options.measure:
        write_json(EFFICIENCY, measure())
    records = read_all(options.records)
    for stages, optimizer in product(STAGES, ("adamw", "muon")):
        if found := ways(records, stages, optimizer, options.remedies):
            print(f"{optimizer}:\n\n{times(found, stages, options.transport)}\n\n{faster(found, stages, options.transport)}\n")
    sizes = memories(16, 16)
    print("| | largest stage, GB | all stages, GB |\n|---|---|---|")
    for name, stages_sizes in sizes.items():
        print(f"| {name} | {max(stages_sizes) / 1e9:.2f} | {sum(stages_sizes) / 1e9:.1f} |")
    if options.time is not None:
        draw_times(records, options.time)
    if options.memory is not None:
        draw_memory(sizes, options.memory)


if __name__ == "__main__":
    main()
