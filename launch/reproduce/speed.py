"""PETRA's Table 5, throughput: measured where there are as many GPUs as stages, otherwise by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from launch.reproduce.paper import TABLE5
from launch.reproduce.report import Report, Request, Scale
from launch.reproduce.runs import collect, job
from launch.run.markdown import table
from petra.analysis.plots import Panel
from petra.cost_model.costs import BlockCost, StageCost, count_blocks, pipeline_costs, profile_blocks
from petra.cost_model.links import Link
from petra.cost_model.simulator import predict
from petra.method import METHODS, Method
from petra.models import revnet18, revnet34
from petra.specs import TensorSpec
from petra.training import sgd

TransportName = Literal["edge", "lockstep"]
MODELS = {"revnet18": revnet18, "revnet34": revnet34}
BATCH = 64
FLOPS = 1e13
"""A second of an assumed device."""
BANDWIDTHS = (1.25, 5.0, 12.5, 25.0, 50.0, 100.0, 300.0, float("inf"))
"""GB/s in each direction: 10 Gb/s Ethernet, …, 100 Gb/s, PCIe 4, …, NVLink, none to wait for."""
LATENCY = 5e-6
CASES: dict[str, tuple[int, TransportName]] = {
    "d = 0": (0, "edge"),
    "d = 1": (1, "edge"),
    "d = 2": (2, "lockstep"),
    "d = 2, edge": (2, "edge"),
    "d = 3": (3, "edge"),
}
"""Delays with the transport that ``auto`` takes, but where another is named."""


def table5(request: Request) -> Report:
    """Times as fast as reversible backpropagation whose stages take turns, one block a stage."""
    smaller = "the simulator, with costs of blocks by FLOPs and as measured on this processor"
    request.require_gpus(min(gpus for gpus, _ in TABLE5.values()), smaller)
    return _measured(request) if request.scale is Scale.PAPER else _simulated(smaller)


def _measured(request: Request) -> Report:
    lines, data = [], {}
    for model, (gpus, printed) in TABLE5.items():
        if not request.gather and torch.cuda.device_count() < gpus:
            lines.append([model, str(gpus), f"needs {gpus} GPUs, found {torch.cuda.device_count()}", "", "", f"{printed}"])
            continue
        base = ("experiment=petra/cifar10", "data=synthetic", "data.images=32000", f"data.batch_size={BATCH}", f"model={model}")
        timed = (*base, "trainer.epochs=3", "schedule.milestones=[2]", "schedule.warmup_epochs=0", "k=1")
        wanted = {name: job(request, f"speed_{model}_{name}", *timed, f"method={name}") for name in ("reversible", "petra")}
        found = collect(request, wanted, processes=gpus)
        speeds = {name: run.summary["images_per_second"] for name, run in found.items()}
        data[model] = {name: run.record() for name, run in found.items()}
        ratio = f"{speeds['petra'] / speeds['reversible']:.2f}" if len(speeds) == 2 else ""
        lines.append([model, str(gpus), *(f"{speeds[n]:.0f}" if n in speeds else "" for n in wanted), ratio, f"{printed}"])
    header = ("model", "GPUs", "reversible, images/s", "PETRA, images/s", "times as fast", "paper")
    return Report(f"{table(header, lines)}\nSynthetic images in CIFAR-10's form, batch {BATCH}.\n", data)


def _simulated(smaller: str) -> Report:
    inputs = TensorSpec((BATCH, 3, 32, 32), torch.float32)
    small = TensorSpec((16, 3, 32, 32), torch.float32)
    optimizer = partial(sgd, momentum=0.9, nesterov=True, weight_decay=5e-4)
    lines, parts, drawn, data = [], [], [], dict[str, Any]()
    for name, (gpus, printed) in TABLE5.items():
        model = MODELS[name](stem="cifar")
        counted = stages_of(count_blocks(model, inputs), 1 / FLOPS)
        timed = stages_of(
            [replace(c, update=0.0) for c in profile_blocks(model, small, optimizer=optimizer, channels_last=True, rounds=3)]
        )
        gains = [speed_up(costs) for costs in (counted, timed)]
        lines.append([name, str(gpus), *(f"{gain:.2f}" for gain in gains), f"{printed}"])
        speeds = {case: [BATCH / period(counted, *of, bandwidth) for bandwidth in BANDWIDTHS] for case, of in CASES.items()}
        data[name] = {"speed_up_flops": gains[0], "speed_up_measured": gains[1], "images_per_second": speeds}
        header = ("GB/s", *CASES)
        rows = [[f"{bandwidth:g}", *(f"{speeds[case][i]:.0f}" for case in CASES)] for i, bandwidth in enumerate(BANDWIDTHS)]
        parts.append(f"{name}, {gpus} devices, images/s against the bandwidth of links and the delay:\n\n{table(header, rows)}")
        points = {case: list(zip(BANDWIDTHS[:-1], of[:-1], strict=True)) for case, of in speeds.items()}
        drawn.append(Panel(f"GB/s of a link, {name}", "images/s", points, "log", powers=True))
    header = ("model", "devices", "times as fast, costs by FLOPs", "costs of this processor", "paper, on GPUs")
    note = (
        f"Simulated: {smaller}; free links for the speed-up. Throughput: CIFAR-10, batch {BATCH}, float32 messages, a device of "
        f"{FLOPS / 1e12:g} TFLOP/s, {1e6 * LATENCY:g} µs a message, one block a stage; edge, but lockstep at d = 2."
    )
    return Report("\n".join([table(header, lines), *parts, note]) + "\n", data, drawn)


def stages_of(blocks: Sequence[BlockCost], seconds: float = 1.0, method: Method = METHODS["petra"]) -> list[StageCost]:
    """Stages of one block each; ``seconds`` is the unit of the blocks' times."""
    keeps = [method.keep_of([b.reversible], last=i == len(blocks) - 1) for i, b in enumerate(blocks)]
    costs = pipeline_costs([[block] for block in blocks], keeps)
    return [replace(c, forward=c.forward * seconds, backward=c.backward * seconds) for c in costs]


def speed_up(costs: Sequence[StageCost]) -> float:
    """Of PETRA over the same stages taking turns, with free links."""
    return predict(costs, METHODS["reversible"]).period / predict(costs, METHODS["petra"]).period


def period(costs: Sequence[StageCost], delay: int, transport: TransportName, bandwidth: float) -> float:
    """Seconds of a microbatch at boundary delay d over links of so many GB/s."""
    method = replace(METHODS["petra"], delay=delay)
    return predict(costs, method, link=Link(1e9 * bandwidth, LATENCY), transport=transport).period
