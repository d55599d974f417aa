"""Targets about memory: PETRA's Table 3, computed from tensor shapes, and Table 6, predicted, or measured on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch

from launch.runtime.terminal import table
from petra.cost_model.stage_memory import Known, count_stage
from petra.method import Keep
from petra.model import Model
from petra.models import revnet18, revnet50
from petra.models.layers import CHANNELS, network, residuals
from petra.models.revnet import revnet_body
from petra.plan.plan import Plan, StagePlan, make_plan
from petra.specs import TensorSpec

from .paper import GPUS, TABLE3, TABLE5_BATCH, TABLE6
from .report import Report, Request, Scale
from .runs import collect
from .speed import iteration_jobs

PARAMETER_COPIES = 3  # weights, gradients and momentum
IMAGENET = TensorSpec((64, 3, 224, 224), torch.float32)
CIFAR = TensorSpec((TABLE5_BATCH, 3, 32, 32), torch.float32)


def _revnet34_of_table6() -> Model:
    """Return the RevNet-34 of Table 6, whose downsampling blocks are the stages 5, 9 and 13: four blocks in each group.

    ResNet-34's groups of 3, 4, 6 and 3 blocks, with the 22.3 million parameters of Table 2, would have them at 4, 8 and 14.
    """
    return network("revnet34", revnet_body(34, 1.0, "auto", "batchnorm")._replace(rows=residuals((4, 4, 4, 4), CHANNELS, 1)), 10)


MODELS: dict[str, Callable[[], Model]] = {"revnet18": revnet18, "revnet34": _revnet34_of_table6}


@dataclass(frozen=True)
class StageParts:
    """Memory of one stage in bytes.

    Attributes:
        parameters: Weights, gradients and momentum.
        inputs: Stored inputs of all microbatches in flight.
        graph: The graph that exists during a backward; at the last stage, that of the forward.
        messages: One message in each direction at each of the two boundaries.
    """

    parameters: int
    inputs: int
    graph: int
    messages: int

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(astuple(self))


def table3(request: Request) -> Report:
    """Compare the total memory of delayed gradients with and without buffers (PETRA, Table 3)."""
    model = revnet50(classes=1000, stem="imagenet")
    totals = {row: sum(stages) / 1e9 for row, stages in totals_of_table3(model, IMAGENET).items()}
    largest = totals[True, True]
    lines = [
        [
            *("yes" if buffered else "no" for buffered in row),
            *map(str, TABLE3[row]),
            f"{value:.2f}",
            f"{100 * (1 - value / largest):.1f}",
        ]
        for row, value in totals.items()
    ]
    header = ("input buffers", "parameter buffers", "paper, GB", "paper, saved, %", "GB", "saved, %")
    note = "RevNet-50, ImageNet, batch 64, float32, k = 1, one block per stage. Ours: computed from shapes at either scale."
    return Report(f"{table(header, lines)}\n{note}\n", [{"inputs": x, "parameters": p, "GB": v} for (x, p), v in totals.items()])


def table6(request: Request) -> Report:
    """Compare the memory of each stage on CIFAR-10 with batches of 256 (PETRA, Table 6).

    At scale=paper, also the allocator's peak on one GPU per stage, in the runs of Table 5.
    """
    request.require_gpus(min(GPUS.values()), "predicted from the engine's accounting")
    texts, data = [], dict[str, Any]()
    for name, build in MODELS.items():
        plan = make_plan(build(), CIFAR, refetch=True)
        parts = stage_parts(plan)
        peaks = _peaks(request, name)
        data[name] = {"parts": [astuple(part) for part in parts], "peaks": peaks}
        lines = []
        for j, (stage, part, published) in enumerate(zip(plan.stages, parts, TABLE6[name], strict=True)):
            without = published - (stage.delay * part.inputs / stage.in_flight / 1e9 if j else 0)
            peak = [f"{peaks[j] / 1e9:.2f}"] if peaks else []
            lines.append([str(j), stage.profiles[0].name, f"{published:.2f}", f"{part.total / 1e9:.2f}", *peak])
            lines[-1] += [f"{without:.2f}", *(f"{value / 1e9:.2f}" for value in astuple(part))]
        lines.append(["all", "", f"{sum(TABLE6[name]):.2f}", f"{sum(part.total for part in parts) / 1e9:.2f}"])
        lines[-1] += [f"{sum(peaks) / 1e9:.2f}"] * bool(peaks) + [""] * 5
        header = (
            *("stage", "block", "paper, GB", "predicted, GB", *(["allocator's peak, GB"] if peaks else [])),
            *("paper without 2(J − j) inputs", *(f"predicted: {field.name}" for field in fields(StageParts))),
        )
        texts.append(f"{name}, stages counted from 0:\n\n{table(header, lines)}")
    note = (
        f"CIFAR-10, batch {TABLE5_BATCH}, float32, k = 1, one block per stage. Ours: `scale={request.scale}`. Predicted: "
        f"{PARAMETER_COPIES} copies of the parameters, the inputs of microbatches in flight at non-reversible blocks, the graph of "
        "one backward, and one message in each direction at each boundary. Stage 0 fetches its input again. The paper's "
        "RevNet-34 has four blocks in each group here (`docs/evidence/paper_tables.md`)."
    )
    return Report("\n".join([*texts, note]) + "\n", data)


def stage_parts(plan: Plan) -> list[StageParts]:
    """Return the memory of each stage of a plan, from the engine's accounting of its blocks."""
    found = []
    for stage in plan.stages:
        stored, graph = activations(plan.model, stage)
        last = stage is plan.stages[-1]
        boundaries = plan.boundaries[max(stage.index - 1, 0) : stage.index + 1]
        found.append(
            StageParts(
                parameters=PARAMETER_COPIES * 4 * stage.parameters,
                inputs=0 if last else stage.in_flight * stored,
                graph=stored if last else graph,
                messages=sum(boundary.forward_bytes + boundary.backward_bytes for boundary in boundaries),
            )
        )
    return found


def activations(model: Model, stage: StagePlan) -> tuple[int, int]:
    """Return the bytes that a stage stores for one microbatch, and those of the largest graph that exists only in a backward."""
    known, forms = Known(), [stage.inputs, *(profile.outputs for profile in stage.profiles)]
    parts = zip(stage.blocks, stage.profiles, forms, strict=False)
    blocks = [replace(stage, blocks=range(b, b + 1), profiles=(p,), inputs=x, keeps=(Keep.GRAPH,)) for b, p, x in parts]
    graphs = [count_stage(model, block, known=known).stored for block in blocks]
    inputs = [sum(spec.bytes for spec in block.inputs) for block in blocks]
    sizes = [{Keep.GRAPH: graph, Keep.INPUT: x}.get(keep, 0) for keep, graph, x in zip(stage.keeps, graphs, inputs, strict=True)]
    return sum(sizes), max((graph for graph, keep in zip(graphs, stage.keeps, strict=True) if keep is not Keep.GRAPH), default=0)


def _peaks(request: Request, model: str) -> list[int]:
    """Return the allocator's peak of each stage at scale=paper, or an empty list if this machine has too few GPUs."""
    if request.scale is Scale.CPU or (not request.gather and torch.cuda.device_count() < GPUS[model]):
        return []
    wanted = {name: job for name, job in iteration_jobs(request, model).items() if name == "petra"}
    found = collect(request, wanted, processes=GPUS[model])
    peaks: list[int] = found["petra"].summary["peak_memory_bytes"] if found else []
    return peaks if len(peaks) == len(TABLE6[model]) else []


def totals_of_table3(model: Model, inputs: TensorSpec) -> dict[tuple[bool, bool], list[int]]:
    """Return the bytes of each stage, one block per stage, with and without buffers (PETRA, Table 3).

    The paper adds up model, input buffers and parameter buffers (section 4.2) and leaves the details to the authors' program: a
    stage stores its parameters, its running statistics and one input; its buffers store 2(J − j) inputs and 2(J − j) copies of the
    parameters. An input is *one* of the two streams, but both at a downsampling stage. The first stage reads its data again. The
    keys are (input buffers, parameter buffers): whether every stage buffers its inputs, or only those that downsample; and whether
    every stage buffers its parameters.
    """
    profiles = model.profile(inputs)
    found: dict[tuple[bool, bool], list[int]] = {(x, p): [] for x in (True, False) for p in (True, False)}
    for j, profile in enumerate(profiles):
        specs = (inputs,) if j == 0 else profiles[j - 1].outputs
        downsamples = not profile.reversible and 0 < j < len(profiles) - 1
        one = sum(spec.bytes for spec in (specs if downsamples else specs[:1]))
        with torch.device("meta"):
            block = model.blocks[j].build()
        parameters = sum(t.nbytes for t in block.parameters())
        statistics = sum(t.nbytes for t in block.buffers() if t.is_floating_point())
        copies = 2 * (len(profiles) - 1 - j)
        for (x, p), stages in found.items():
            buffered = copies * (one * (x or downsamples) + parameters * p)
            stages.append(parameters + statistics + one + buffered)
    return found
