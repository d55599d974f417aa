"""Where each method wins: the fastest that fits, by the memory of a device and the bandwidth of the links.

python -m benchmarks.method_map docs/evidence/records/method_map.json --picture docs/figures/method_map.svg

With ``--drawn``, it draws what the file has instead of predicting it.

``revgpt`` of 1.3, 7 and 70 billion parameters in its layers, on 8, 16 and 64 devices of 60 and 400 TFLOP/s, trains with AdamW on 64
sequences of 4,096 tokens per update, one per microbatch, in bf16 with bf16 messages. The vocabulary has 32,000 tokens. Methods that
need no reversible blocks train ``gpt``, the ordinary transformer of the same shapes, whose messages are half as large. All is
predicted: what petra trains by its planner, with ``method.keep=auto``, and rivals by the formulas of :mod:`benchmarks.rivals`.
Messages follow the rules of ``trainer.transport=edge``. Latency is left out, because messages have megabytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.rivals import Pipelined, fsdp
from petra import METHODS, ConfigError, Method, Model, Numerics, Plan, Recipe, TensorSpec, make_plan
from petra.analysis.plots import DISTINCT, own_settings
from petra.cost_model.autotune import Tuned, tune
from petra.cost_model.costs import BlockCost, StageCost, count_blocks
from petra.cost_model.event_graph import ZB_H1
from petra.cost_model.keeps import BlockMemory, count_memory, tune_keeps
from petra.cost_model.machines import Device, Link
from petra.cost_model.memory import PredictedMemory, predict_memory
from petra.cost_model.simulator import predict
from petra.cost_model.stage_memory import Known
from petra.models import gpt, revgpt
from petra.training import OPTIMIZERS

K, TOKENS, CLASSES = 64, 4096, 32_000
SIZES = {"1.3 B": (2048, 21, 32, 8192, 8), "7 B": (4096, 32, 32, 14336, 16), "70 B": (8192, 80, 64, 28672, 64)}
"""Width, layers, heads, hidden units and devices."""
TERAFLOPS = (60, 400)
MEMORIES = (8, 12, 16, 24, 32, 48, 80, 141)
"""GB of a device."""
STEP = (TERAFLOPS[1] / TERAFLOPS[0]) ** 0.5
"""Ratio of two bandwidths: the slower devices need the same predictions as the faster ones, two steps further."""
BANDWIDTHS = tuple(0.1 * STEP**i for i in range(9))
"""GB/s in each direction of a link."""
HOST = 25.0
"""GB/s in each direction between a device and its host."""
NUMERICS = Numerics(torch.bfloat16, message_format="bf16")
PETRA, LATE, EXACT, REVERSIBLE = (f"{name}, keep=auto" for name in ("PETRA", "dsp", "1F1B", "reversible 1F1B"))
TRAINED = {
    PETRA: ("revgpt", METHODS["petra"], (1, 2)),
    LATE: ("gpt", METHODS["dsp"], (1, 2)),
    EXACT: ("gpt", METHODS["1f1b"], (1,)),
    REVERSIBLE: ("revgpt", METHODS["1f1b"], (1,)),
}
"""What petra trains: network, method and delays. Blocks store what is fastest in the memory: with much of it, ``dsp`` is PACI."""
RIVALS = ("ZB-H1", "V-Half", "V-Min", "1F1B with offload", "FSDP")
NAMES = (*TRAINED, *RIVALS)
EXACT_NAMES = (EXACT, REVERSIBLE, *RIVALS)
NONE = "nothing fits"
TIED = 0.01
"""Relative difference of times that is no reason to choose a method."""

Found = dict[str, float]
"""Seconds per microbatch of the methods that fit, by their name."""


@dataclass(frozen=True)
class Candidate:
    """A setting with the costs of its stages in FLOPs, and its bytes on the fullest device."""

    method: Method
    costs: tuple[StageCost, ...]
    bytes: float


class Network:
    """A network on a number of devices, whose predictions for a setting don't depend on how fast the devices are."""

    def __init__(self, kind: str, size: str) -> None:
        width, layers, heads, hidden, self.devices = SIZES[size]
        build = {"gpt": gpt, "revgpt": revgpt}[kind]
        options: dict[str, Any] = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rotary", "qk_norm": True}
        self.model: Model = build(CLASSES, width, layers, heads, size=TOKENS, kv_heads=8, hidden=hidden, **options)
        self.inputs, self.targets = TensorSpec((1, TOKENS), torch.int64), TensorSpec((TOKENS,), torch.int64)
        self.recipe, self.known = Recipe(partial(OPTIMIZERS["adamw"])), Known()
        self.blocks: Sequence[BlockCost] = count_blocks(self.model, self.inputs, NUMERICS)
        self.parameters = [profile.parameters for profile in self.model.profile(self.inputs)]
        self.periods = cache(self._period)

    def plan(self, method: Method, stages: Sequence[int] | int) -> Plan:
        """Return the plan of a method with a device for each stage."""
        return make_plan(
            self.model,
            self.inputs,
            method=method,
            k=K,
            stages=stages if isinstance(stages, int) else list(stages),
            processes=self.devices,
            numerics=NUMERICS,
            device_type="cuda",
        )

    def memory(self, method: Method, tuned: Tuned) -> list[PredictedMemory]:
        """Return the memory of each device."""
        method = replace(method, delay=tuned.delay, keep=method.keep if tuned.keep is None else tuned.keep)
        return predict_memory(self.plan(method, tuned.stages), self.recipe, self.targets, self.known)

    def block_memory(self, method: Method) -> list[BlockMemory]:
        """Return the bytes of each block."""
        return count_memory(self.plan(method, self.devices), self.recipe, self.targets, self.known)

    def within(self, method: Method, blocks: Sequence[BlockMemory], limit: float) -> Candidate | None:
        """Return the fastest setting of a method that fits a limit in bytes; None if there is none."""
        devices = [Device(memory=limit)] * self.devices
        try:
            found, memory = tune_keeps(self.blocks, blocks, method, K, self.devices, devices, partial(self.memory, method), "")
        except ConfigError:
            return None
        assert found.keep is not None
        return Candidate(replace(method, keep=found.keep), found.costs, max(own.total for own in memory))

    def _period(self, method: Method, costs: tuple[StageCost, ...], per_flop: float) -> float:
        """Return the FLOPs that a device could compute in the period, for bytes that a link carries per FLOP of a device."""
        return predict(costs, method, K, link=Link(per_flop)).period


def trained(networks: Mapping[str, Network], limits: Sequence[float]) -> Iterator[tuple[str, list[list[Candidate]]]]:
    """Yield what petra trains: its name, and for each limit in bytes the settings that fit."""
    for name, (kind, method, delays) in TRAINED.items():
        network, found = networks[kind], list[list[Candidate]]()
        methods = [replace(method, delay=delay) for delay in delays]
        blocks = network.block_memory(methods[0])
        free = [network.within(each, blocks, math.inf) for each in methods]
        for limit in limits:
            pairs = zip(methods, free, strict=True)
            own = [most if most and most.bytes <= limit else network.within(each, blocks, limit) for each, most in pairs]
            found.append([each for each in own if each is not None])
        yield name, found


def one_f_one_b(network: Network) -> tuple[Method, tuple[StageCost, ...], Pipelined]:
    """Return 1F1B with stored graphs on the partition that is fastest."""
    method = METHODS["1f1b"]
    tuned = tune(network.blocks, method, K, network.devices)
    flights = [stage.in_flight for stage in network.plan(method, tuned.stages).stages]
    return method, tuned.costs, Pipelined(network.memory(method, tuned), flights, fmean(tuned.seconds), K)


def rivals(network: Network, flops: float, bandwidth: float, host: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, seconds per microbatch and bytes of the rivals, for each setting that they have."""
    method, costs, pipelined = one_f_one_b(network)
    in_seconds = replace(pipelined, mean=pipelined.mean / flops)
    usual, doubled = (network.periods(method, costs, share * bandwidth / flops) / flops for share in (1.0, 0.5))
    fullest = max(own.total for own in pipelined.memory)
    yield "ZB-H1", network.periods(ZB_H1, costs, bandwidth / flops) / flops, fullest
    for name in ("V-Half", "V-Min"):
        yield name, *in_seconds.v_shaped(name, doubled)
    yield "1F1B with offload", *in_seconds.offloaded(usual, host)
    memory = network.block_memory(replace(METHODS["dsp"]))
    for seconds, size in fsdp(network.blocks, memory, network.parameters, network.devices, K, flops, bandwidth):
        yield "FSDP", seconds, size


def cells(size: str, host: float) -> Iterator[dict[str, Any]]:
    """Yield the seconds per microbatch of the methods that fit in each cell of the maps of a size."""
    networks = {kind: Network(kind, size) for kind in ("gpt", "revgpt")}
    own = dict(trained(networks, [1e9 * memory for memory in MEMORIES]))
    one_f_one_b_once = cache(lambda *key: [*rivals(networks["gpt"], *key)])
    for teraflops in TERAFLOPS:
        for bandwidth in BANDWIDTHS:
            flops, link = 1e12 * teraflops, 1e9 * bandwidth
            others = one_f_one_b_once(flops, link, 1e9 * host)
            for i, memory in enumerate(MEMORIES):
                found: Found = {}
                for name, settings in own.items():
                    network = networks[TRAINED[name][0]]
                    times = [network.periods(each.method, each.costs, round(link / flops, 12)) / flops for each in settings[i]]
                    found |= {name: min(times)} if times else {}
                for name, seconds, needed in others:
                    if needed <= 1e9 * memory:
                        found[name] = min(seconds, found.get(name, seconds))
                rounded = {name: float(f"{seconds:.4g}") for name, seconds in found.items()}
                at = {"size": size, "teraflops": teraflops, "memory": memory, "bandwidth": float(f"{bandwidth:.4g}")}
                yield {**at, "host": host, "seconds": rounded}


def place(cell: Mapping[str, Any]) -> tuple[str, int]:
    """Return the map that a cell belongs to."""
    return cell["size"], cell["teraflops"]


def winner(found: Found, names: Sequence[str]) -> str:
    """Return the fastest of some methods. Of those within :data:`TIED` of it, exact ones come first, then PETRA."""
    fastest = min((found[name] for name in names if name in found), default=0.0)
    tied = [name for name in names if name in found and found[name] <= fastest * (1 + TIED)]
    return min(tied, key=lambda name: (name not in EXACT_NAMES, names.index(name)), default=NONE)


@own_settings()
def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a map for each size and speed, exact methods above and all below."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = [*NAMES, NONE]
    colours = ListedColormap([*DISTINCT[: len(NAMES)], "white"])
    columns = [*dict.fromkeys(map(place, found))]
    figure = Figure(figsize=(3.1 * len(columns), 7.6), layout="constrained")
    places = figure.subplots(2, len(columns), sharex=True, sharey=True, squeeze=False)
    seen = set[str]()
    for row, (title, names) in enumerate({"exact gradients": EXACT_NAMES, "all methods": NAMES}.items()):
        for axes, (size, speed) in zip(places[row], columns, strict=True):
            own = {(cell["bandwidth"], cell["memory"]): cell["seconds"] for cell in found if place(cell) == (size, speed)}
            best = [[winner(own[float(f"{b:.4g}"), m], names) for m in MEMORIES] for b in BANDWIDTHS]
            seen |= {name for line in best for name in line}
            numbers = [[shown.index(name) for name in line] for line in best]
            axes.pcolormesh(numbers, cmap=colours, vmin=-0.5, vmax=len(shown) - 0.5, edgecolors="white", linewidth=0.5)
            axes.set_xticks([i + 0.5 for i in range(len(MEMORIES))], [str(m) for m in MEMORIES], fontsize="x-small", rotation=90)
            axes.set_yticks([i + 0.5 for i in range(len(BANDWIDTHS))], [f"{b:.3g}" for b in BANDWIDTHS], fontsize="x-small")
            axes.set_title(f"{size}, {SIZES[size][4]} × {speed} TFLOP/s\n{title}", fontsize="small")
    figure.supxlabel("memory of a device (GB)")
    figure.supylabel("bandwidth of a link in each direction (GB/s)")
    handles = [Patch(facecolor=colours(i), edgecolor="grey", label=name) for i, name in enumerate(shown) if name in seen]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(seen), fontsize="small")
    figure.savefig(path)


def main() -> None:
    """Predict, write the figures, and draw the maps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file of all predictions")
    parser.add_argument("--picture", type=Path, required=True, help=".svg or .png")
    parser.add_argument("--sizes", nargs="*", default=[*SIZES], choices=SIZES)
    parser.add_argument("--host", type=float, default=HOST, help=f"GB/s to and from the host (default: {HOST:g})")
    parser.add_argument("--drawn", action="store_true", help="draw what the file has")
    options = parser.parse_args()
    if not options.drawn:
        found = [cell for size in options.sizes for cell in cells(size, options.host)]
        lines = ",\n".join(json.dumps(cell, ensure_ascii=False) for cell in found)
        options.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    draw(json.loads(options.out.read_text(encoding="utf-8")), options.picture)


if __name__ == "__main__":
    main()
