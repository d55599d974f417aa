"""PETRA's Table 5, throughput: measured on a machine with one GPU per stage, simulated elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from petra.analysis.plots import Panel
from petra.cost_model.costs import BlockCost, StageCost, count_blocks, pipeline_costs, profile_blocks
from petra.cost_model.links import Link
from petra.cost_model.simulator import predict
from petra.cost_model.wires import WireModel
from petra.method import METHODS
from petra.models import revnet18, revnet34
from petra.plan.plan import Plan, make_plan
from petra.specs import TensorSpec
from petra.training import sgd

from ..run.markdown import table
from .paper import TABLE5
from .report import Report, Request, Scale
from .runs import collect, job

MODELS = {"revnet18": revnet18, "revnet34": revnet34}
BATCH = 64
FLOPS = 1e13
"""FLOP/s of the simulated device."""
BANDWIDTHS = (1.25, 5.0, 12.5, 25.0, 50.0, 100.0, 300.0, float("inf"))
"""GB/s in each direction: 10 Gb/s Ethernet, ..., 100 Gb/s Ethernet, PCIe 4, ..., NVLink, infinitely fast."""
LATENCY = 5e-6
CASES: dict[str, tuple[int, WireModel]] = {
    "d = 0": (0, "edge"),
    "d = 1": (1, "edge"),
    "d = 2": (2, "lockstep"),
    "d = 2, edge": (2, "edge"),
    "d = 3": (3, "edge"),
}
"""Delay and transport. The transport is that of ``auto`` unless the name contains another."""


def table5(request: Request) -> Report:
    """Compare PETRA's throughput with reversible backpropagation whose stages take turns, one block per stage (PETRA, Table 5)."""
    smaller = "the simulator, with block costs in FLOPs and as measured on this processor"
    request.require_gpus(min(gpus for gpus, _ in TABLE5.values()), smaller)
    return _measured(request) if request.scale is Scale.PAPER else _simulated(smaller)


def stage_costs(plan: Plan, blocks: Sequence[BlockCost], seconds: float = 1.0) -> list[StageCost]:
    """Return the cost of each stage of a plan.

    Args:
        blocks: Cost of each block of the model.
        seconds: Unit of the times in ``blocks``.
    """
    costs = pipeline_costs([[blocks[b] for b in stage.blocks] for stage in plan.stages], [stage.keeps for stage in plan.stages])
    return [replace(cost, forward=cost.forward * seconds, backward=cost.backward * seconds) for cost in costs]


def speed_up(costs: Sequence[StageCost]) -> float:
    """Return the speed-up of PETRA over the same stages taking turns, with infinitely fast links."""
    return predict(costs, METHODS["reversible"]).period / predict(costs, METHODS["petra"]).period


def period(costs: Sequence[StageCost], delay: int, transport: WireModel, bandwidth: float) -> float:
    """Return the seconds per microbatch with delay d at every boundary and links of ``bandwidth`` GB/s."""
    method = replace(METHODS["petra"], delay=delay)
    return predict(costs, method, link=Link(1e9 * bandwidth, LATENCY), transport=transport).period


def _measured(request: Request) -> Report:
    lines, data = [], {}
    for model, (gpus, published) in TABLE5.items():
        if not request.gather and torch.cuda.device_count() < gpus:
            lines.append(
                [model, str(gpus), f"needs {gpus} GPUs, this machine has {torch.cuda.device_count()}", "", "", f"{published}"]
            )
            continue
        base = ("experiment=petra/cifar10", "data=synthetic", "data.images=32000", f"data.batch_size={BATCH}", f"model={model}")
        timed = (*base, "trainer.epochs=3", "schedule.milestones=[2]", "schedule.warmup_epochs=0", "k=1")
        wanted = {name: job(request, f"speed_{model}_{name}", *timed, f"method={name}") for name in ("reversible", "petra")}
        found = collect(request, wanted, processes=gpus)
        speeds = {name: run.summary["images_per_second"] for name, run in found.items()}
        data[model] = {name: run.record() for name, run in found.items()}
        ratio = f"{speeds['petra'] / speeds['reversible']:.2f}" if len(speeds) == 2 else ""
        lines.append([model, str(gpus), *(f"{speeds[n]:.0f}" if n in speeds else "" for n in wanted), ratio, f"{published}"])
    header = ("model", "GPUs", "reversible, images/s", "PETRA, images/s", "speed-up", "speed-up in the paper")
    return Report(f"{table(header, lines)}\nSynthetic images in the format of CIFAR-10, batch {BATCH}.\n", data)


def _simulated(smaller: str) -> Report:
    inputs = TensorSpec((BATCH, 3, 32, 32), torch.float32)
    profiled_inputs = TensorSpec((16, 3, 32, 32), torch.float32)
    optimizer = partial(sgd, momentum=0.9, nesterov=True, weight_decay=5e-4)
    lines, parts, diagrams, data = [], [], [], dict[str, Any]()
    for name, (gpus, published) in TABLE5.items():
        model = MODELS[name](stem="cifar")
        plan = make_plan(model, inputs)
        counted = stage_costs(plan, count_blocks(model, inputs), 1 / FLOPS)
        profiled = profile_blocks(model, profiled_inputs, optimizer=optimizer, channels_last=True, rounds=3)
        timed = stage_costs(plan, [replace(cost, update=0.0) for cost in profiled])
        gains = [speed_up(costs) for costs in (counted, timed)]
        lines.append([name, str(gpus), *(f"{gain:.2f}" for gain in gains), f"{published}"])
        speeds = {case: [BATCH / period(counted, *how, bandwidth) for bandwidth in BANDWIDTHS] for case, how in CASES.items()}
        data[name] = {"speed_up_flops": gains[0], "speed_up_measured": gains[1], "images_per_second": speeds}
        rows = [[f"{bandwidth:g}", *(f"{speeds[case][i]:.0f}" for case in CASES)] for i, bandwidth in enumerate(BANDWIDTHS)]
        parts.append(f"{name} on {gpus} devices, images/s by link bandwidth and delay:\n\n{table(('GB/s', *CASES), rows)}")
        points = {case: list(zip(BANDWIDTHS[:-1], values[:-1], strict=True)) for case, values in speeds.items()}
        diagrams.append(Panel(f"GB/s of a link, {name}", "images/s", points, "log", powers=True))
    header = ("model", "devices", "speed-up, costs in FLOPs", "speed-up, costs of this processor", "speed-up in the paper, on GPUs")
    note = (
        f"Simulated: {smaller}. The speed-up assumes infinitely fast links. Throughput: CIFAR-10, batch {BATCH}, float32 messages, "
        f"devices of {FLOPS / 1e12:g} TFLOP/s, {1e6 * LATENCY:g} µs per message, one block per stage, transport edge except for "
        "d = 2, which uses lockstep unless stated."
    )
    return Report("\n".join([table(header, lines), *parts, note]) + "\n", data, diagrams)
