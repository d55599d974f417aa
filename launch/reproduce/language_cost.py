"""Targets about the cost of language models: memory of each stage of the 7B preset, and simulated time to a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from petra.analysis.plots import Panel
from petra.cost_model.costs import StageCost
from petra.cost_model.links import Link
from petra.cost_model.memory import WORKSPACE, predict_memory
from petra.cost_model.simulator import predict
from petra.diagnostics.activation_memory import graph_bytes
from petra.engine.build import Recipe
from petra.engine.endpoints import Losses
from petra.engine.metrics import correct_predictions
from petra.engine.update_rules import UpdateRules
from petra.method import METHODS, Keep, Method, Split
from petra.model import Model
from petra.models import MODELS
from petra.plan.plan import Plan, make_plan
from petra.settings import Numerics
from petra.specs import TensorSpec
from petra.staleness import Remedy
from petra.training import OPTIMIZERS

from ..config.compose import compose_overrides
from ..run.markdown import table
from .language import EXACT, EXACT_MUON, FRESH_FEEDBACK, SMALL_FEEDBACK, TWO_VERSIONS_FEEDBACK, reached
from .report import Report, Request

PRESET, VOCABULARY, CONTEXT = "revgpt_7b", 32_000, 4096
BYTES_PER_PARAMETER, GRADIENT_BYTES = 16, 4
"""Weights, gradients and AdamW's two averages in float32; and the gradient of a microbatch, before it is added."""
DEVICES = (16, 32)
NUMERICS = Numerics(autocast=torch.bfloat16, wire=torch.bfloat16)
ONE_F_ONE_B, CHECKPOINTING = "1F1B", "1F1B, activation checkpointing"
COMPARED: dict[str, tuple[str, Method]] = {
    "PETRA": ("revgpt", METHODS["petra"]),
    ONE_F_ONE_B: ("gpt", METHODS["1f1b"]),
    CHECKPOINTING: ("gpt", replace(METHODS["1f1b"], keep=Keep.INPUT)),
}
"""Model and method of each compared pipeline."""

FLOPS, LATENCY = 4e14, 5e-6
"""FLOP/s of the simulated device, and seconds per message."""
BATCH = 256
"""Windows per update, each a microbatch."""
LINKS = (12.5, 300.0)
"""GB/s in each direction: 100 Gb/s Ethernet, NVLink."""
SIMULATED = (8, 16, 32, 64)
BACKPROP = (EXACT, EXACT_MUON)
TWO_VERSIONS = ("PipeDream-2BW", "PipeDream-2BW, Muon", TWO_VERSIONS_FEEDBACK)
PETRA = ("petra", SMALL_FEEDBACK)
FRESH = ("petra, d = 1, small microbatches", FRESH_FEEDBACK)


@dataclass(frozen=True)
class Schedule:
    """A simulated way to train.

    Attributes:
        model: ``gpt`` or ``revgpt``.
        settings: Settings of the target ``lm-parity`` that make the same updates or more stale ones. The fastest counts.
    """

    model: str
    method: Method
    settings: tuple[str, ...]


SCHEDULES = {
    "GPipe": Schedule("gpt", METHODS["gpipe"], BACKPROP),
    "1F1B": Schedule("gpt", METHODS["1f1b"], BACKPROP),
    CHECKPOINTING: Schedule("gpt", replace(METHODS["1f1b"], keep=Keep.INPUT), BACKPROP),
    "ZB-H1": Schedule("gpt", METHODS["zb_h1"], BACKPROP),
    "PipeDream-2BW": Schedule("gpt", replace(METHODS["pipedream_2bw"], keep=Keep.GRAPH), TWO_VERSIONS),
    "PipeDream-2BW, activation checkpointing": Schedule("gpt", METHODS["pipedream_2bw"], TWO_VERSIONS),
    "PETRA": Schedule("revgpt", METHODS["petra"], PETRA),
    "PETRA, d = 1": Schedule("revgpt", replace(METHODS["petra"], delay=1), FRESH),
    "PETRA, d = 1, early messages": Schedule("revgpt", replace(METHODS["petra"], delay=1, split=Split.INPUT_FIRST), FRESH),
}


def language_model(name: str, depth: int | None = None) -> Model:
    """Return the model ``gpt`` or ``revgpt`` in the shapes of the preset, with another number of layers if ``depth`` is given."""
    options = compose_overrides((f"model={PRESET}", "data=tokens")).model.options()
    if name == "gpt":
        options = {key: value for key, value in options.items() if key not in ("coupling", "step")}
    return MODELS[name](VOCABULARY, size=CONTEXT, **(options if depth is None else options | {"depth": depth}))


def memory(request: Request) -> Report:
    """Predict the memory of the stages of the 7B preset under PETRA and 1F1B."""
    lines, panels, data = [], [], {}
    for devices in DEVICES:
        by_stage: dict[str, list[tuple[float, float]]] = {}
        for name, (model, method) in COMPARED.items():
            plan = memory_plan(language_model(model), method, devices)
            counted = formula(plan)
            by_stage[name] = [(j, value / 1e9) for j, value in enumerate(counted, 1)]
            for j in (0, devices // 2):
                found = predict_memory(plan, adamw(), TensorSpec((CONTEXT,), torch.int64), process=j)
                parts = (found.weights + found.gradients + found.optimizer, found.stored, found.temporary)
                cells = [f"{value / 1e9:.1f}" for value in (*parts, found.total, counted[j])]
                lines.append([str(devices), name, str(j + 1), str(plan.stages[j].in_flight), *cells])
            data[f"{name}, {devices} devices"] = {"formula": counted}
        panels.append(Panel(f"stage of {devices}", "memory (GB)", by_stage))
    header = (
        *("devices", "method", "stage", "in flight n", "weights, gradients, AdamW, GB", "stored, GB", "one step, GB"),
        *("engine, GB", "formula, GB"),
    )
    note = (
        f"The shapes of `{PRESET}` with a vocabulary of {VOCABULARY:,}, one window of {CONTEXT} tokens per microbatch, bf16. "
        "PETRA trains `revgpt`, 1F1B the ordinary transformer `gpt`. *Engine*: `dry_run=memory`, the engine's allocations on "
        f"tensors without data, with {WORKSPACE // 2**20} MiB of workspace. *Formula*: 16·P + n·A + G + 4·M bytes, with P the "
        "parameters of the stage, A what its blocks store per microbatch (PETRA: the input of blocks that are not reversible; "
        "1F1B: the graph, or the input of each block), G the largest graph that exists only during a backward pass, with the "
        "gradients of its block, and M the message to the next stage."
    )
    return Report(f"{table(header, lines)}\n{note}\n", data, panels)


def memory_plan(model: Model, method: Method, devices: int) -> Plan:
    """Return the plan whose memory is predicted: layers divided equally, embedding and output layer in the first and last stage.

    PETRA's memory does not depend on k, so k is as small as possible.
    """
    k = devices if method.flush else 1
    layers = (len(model.blocks) - 2) // devices
    stages = [layers + (j in (0, devices - 1)) for j in range(devices)]
    inputs = TensorSpec((1, CONTEXT), torch.int64)
    return make_plan(model, inputs, method=method, k=k, stages=stages, processes=devices, numerics=NUMERICS)


def formula(plan: Plan) -> list[int]:
    """Return 16·P + n·A + G + 4·M of each stage in bytes, see :func:`memory`."""
    graphs: dict[object, int] = {}
    found = []
    for stage in plan.stages:
        stored, temporary, streams = 0, 0, stage.inputs
        for b, keep, profile in zip(stage.blocks, stage.keeps, stage.profiles, strict=True):
            key = (plan.model.blocks[b].kind, streams)
            if key not in graphs:
                graphs[key] = graph_bytes(plan.model, range(b, b + 1), streams, [Keep.GRAPH], autocast=plan.numerics.autocast)
            if keep is Keep.GRAPH:
                stored += graphs[key]
            else:
                stored += 0 if keep is Keep.NOTHING else sum(spec.bytes for spec in streams)
                temporary = max(temporary, graphs[key] + GRADIENT_BYTES * profile.parameters)
            streams = profile.outputs
        message = plan.boundaries[stage.index].forward_bytes if stage.index < len(plan.boundaries) else 0
        found.append(BYTES_PER_PARAMETER * stage.parameters + stage.in_flight * stored + temporary + 4 * message)
    return found


def time(request: Request) -> Report:
    """Simulate the tokens per second of each schedule, and with the runs of ``lm-parity`` the time to backpropagation's loss."""
    relative = reached(request)
    lines, data, panels = [], {}, []
    for bandwidth in LINKS:
        speeds: dict[str, list[tuple[float, float]]] = {
            name: [(devices, tokens_per_second(schedule, devices, bandwidth)) for devices in SIMULATED]
            for name, schedule in SCHEDULES.items()
        }
        exact = dict(speeds[ONE_F_ONE_B])
        times: dict[str, list[tuple[float, float]]] = {}
        for name, schedule in SCHEDULES.items():
            known = {setting: relative[setting] for setting in schedule.settings if setting in relative}
            fastest = min(known, key=lambda setting: known[setting], default="")
            more = known.get(fastest)
            cells = [f"{speed / 1e3:.1f}" for _, speed in speeds[name]]
            cells += [fastest, "" if more is None else f"{more:.2f}"]
            if more is not None:
                times[name] = [(n, more * exact[n] / speed) for n, speed in speeds[name]]
            cells += [f"{time:.2f}" for _, time in times[name]] if name in times else [""] * len(SIMULATED)
            lines.append([f"{bandwidth:g}", name, *cells])
        data[f"{bandwidth:g}"] = speeds
        panels.append(Panel(f"devices, links of {bandwidth:g} GB/s", "thousand tokens/s", _thousands(speeds), powers=True))
        if times:
            panels.append(Panel(f"devices, links of {bandwidth:g} GB/s", "time to the loss, relative to 1F1B", times, powers=True))
    header = (
        *("GB/s", "schedule", *(f"10³ tokens/s, {n} devices" for n in SIMULATED), "trained as", "tokens to the loss, relative"),
        *(f"time to the loss, {n} devices, relative to 1F1B" for n in SIMULATED),
    )
    note = (
        f"Simulated: devices of {FLOPS / 1e12:g} TFLOP/s, two layers of `{PRESET}` per device, {BATCH} windows of {CONTEXT} "
        f"tokens per update, one per microbatch; bf16 messages, {1e6 * LATENCY:g} µs each. *Tokens to the loss* are measured "
        "with 8 stages (`lm-parity`): tokens until the training loss is at most 1 % above the lowest at the end of "
        "backpropagation, relative to backpropagation."
    )
    return Report(f"{table(header, lines)}\n{note}\n", data, panels)


def tokens_per_second(schedule: Schedule, devices: int, bandwidth: float) -> float:
    """Return the simulated speed with links of ``bandwidth`` GB/s.

    Each device has two layers; the first also has the embedding, and the output layer takes the place of the last layer.
    """
    model = language_model(schedule.model, 2 * devices - 1)
    stages = [3, *[2] * (devices - 1)]
    plan = make_plan(
        model,
        TensorSpec((1, CONTEXT), torch.int64),
        method=schedule.method,
        k=BATCH,
        stages=stages,
        processes=devices,
        numerics=NUMERICS,
    )
    predicted = predict(stage_costs(plan), plan.method, BATCH, link=Link(1e9 * bandwidth, LATENCY))
    return CONTEXT / predicted.period


def stage_costs(plan: Plan) -> list[StageCost]:
    """Return the cost of each stage: FLOPs of a forward pass 1, of a backward pass 2, and 1 for what it computes again."""
    costs = []
    for stage in plan.stages:
        pairs = list(zip(stage.profiles, stage.keeps, strict=True))
        again = sum(profile.flops for profile, keep in pairs if keep is not Keep.GRAPH)
        after = plan.boundaries[stage.index].forward_bytes if stage.index < len(plan.boundaries) else 0
        before = plan.boundaries[stage.index - 1].backward_bytes if stage.index else 0
        costs.append(
            StageCost(
                stage.flops / FLOPS,
                (2 * stage.flops + again) / FLOPS,
                forward_bytes=after,
                backward_bytes=before,
                weights=stage.flops / FLOPS,
            )
        )
    return costs


def _thousands(speeds: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: [(n, speed / 1e3) for n, speed in points] for name, points in speeds.items()}


def adamw() -> Recipe:
    """Return training settings with AdamW, whose states the accounting includes."""
    losses = Losses(F.cross_entropy, F.cross_entropy)
    return Recipe(OPTIMIZERS["adamw"], lambda t: 1e-3, losses, {"accuracy": correct_predictions}, 0, UpdateRules(), Remedy())
