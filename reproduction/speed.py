"""PETRA's Table 5, throughput: measured on a machine with one GPU per stage, simulated elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from launch.runtime.terminal import table
from petra.cost_model.costs import BlockCost, StageCost, count_blocks, pipeline_costs, profile_blocks
from petra.cost_model.simulator import predict
from petra.diagnostics.events import Kind
from petra.errors import require
from petra.method import METHODS
from petra.model import Model
from petra.models import revnet18, revnet34, revnet50
from petra.plan.plan import Plan, make_plan
from petra.settings import Numerics
from petra.specs import TensorSpec
from petra.training import sgd

from .jobs import Job
from .paper import GPUS, TABLE5, TABLE5_BATCH, TABLE5_TIMED, TABLE5_WARMUP
from .report import Report, Request, Scale
from .runs import Run, collect, job, records

MODELS: dict[str, Callable[..., Model]] = {"revnet18": revnet18, "revnet34": revnet34, "revnet50": revnet50}
HEADER = (
    *("model", "devices", "reversible, paper, ms", "PETRA, paper, ms", "speed-up, paper"),
    *("reversible, ours, ms", "PETRA, ours, ms", "speed-up, ours"),
)
HOW_TIMED = (
    f"Paper: microbatches of {TABLE5_BATCH} images, {TABLE5_WARMUP} iterations of warm-up, mean of {TABLE5_TIMED} (section 4.2)."
)


def table5(request: Request) -> Report:
    """Compare PETRA's throughput with reversible backpropagation whose stages take turns, one block per stage (PETRA, Table 5)."""
    smaller = "the simulator, with block costs in FLOPs and as measured on this processor"
    request.require_gpus(min(GPUS.values()), smaller)
    return _measured(request) if request.scale is Scale.PAPER else _simulated(smaller)


def stage_costs(plan: Plan, blocks: Sequence[BlockCost]) -> list[StageCost]:
    """Return the cost of each stage of a plan, given that of each block of the model."""
    return pipeline_costs([[blocks[b] for b in stage.blocks] for stage in plan.stages], [stage.keeps for stage in plan.stages])


def speed_up(costs: Sequence[StageCost]) -> float:
    """Return the speed-up of PETRA over the same stages taking turns, with infinitely fast links."""
    return predict(costs, METHODS["reversible"]).period / predict(costs, METHODS["petra"]).period


def iteration_jobs(request: Request, model: str) -> dict[str, Job]:
    """Return the runs of one row of Table 5 by method, as the paper times them: one stage per block, k = 1, 256 images."""
    # The pipeline still has to be full when the last timed microbatch completes.
    microbatches = TABLE5_WARMUP + TABLE5_TIMED + 2 * GPUS[model]
    base = (
        *("experiment=petra/cifar10", "data=synthetic", f"data.images={microbatches * TABLE5_BATCH}", f"model={model}", "k=1"),
        *(f"data.batch_size={TABLE5_BATCH}", "trainer.epochs=1", "schedule.milestones=[]", f"trainer.trace={microbatches}"),
    )
    return {name: job(request, f"iterations_{model}_{name}", *base, f"method={name}") for name in ("reversible", "petra")}


def iteration_milliseconds(run: Run) -> float:
    """Return the mean milliseconds per microbatch, between the ends of two backwards of the first stage in the run's trace.

    Raises:
        ConfigError: If the run has no trace of all these microbatches.
    """
    path, last = run.folder / "trace.json", TABLE5_WARMUP + TABLE5_TIMED - 1
    events = json.loads(path.read_text())["traceEvents"] if path.exists() else []
    ends = {e["args"]["microbatch"]: e["ts"] + e["dur"] for e in events if e.get("cat") == Kind.BACKWARD and e["tid"] == 0}
    known = {last, last - TABLE5_TIMED} <= ends.keys()
    require(known, "--runs", f"runs with trainer.trace={last + 1} or more", f"{run.folder} without the backwards in trace.json")
    return float(ends[last] - ends[last - TABLE5_TIMED]) / TABLE5_TIMED / 1000


def _measured(request: Request) -> Report:
    lines, data = [], {}
    for model, gpus in GPUS.items():
        if not request.gather and torch.cuda.device_count() < gpus:
            needed = f"needs {gpus} GPUs, this machine has {torch.cuda.device_count()}"
            lines.append([model, str(gpus), *_printed(model), needed, "", ""])
            continue
        found = collect(request, iteration_jobs(request, model), processes=gpus)
        times = {name: iteration_milliseconds(run) for name, run in found.items()}
        data[model] = records(found) | {"milliseconds": times}
        ratio = f"{times['reversible'] / times['petra']:.2f}" if len(times) == 2 else "–"
        ours = [f"{times[name]:.1f}" if name in times else "–" for name in ("reversible", "petra")]
        lines.append([model, str(gpus), *_printed(model), *ours, ratio])
    note = (
        f"Ours: `scale=paper`, one GPU per stage, synthetic images in the format of CIFAR-10. {HOW_TIMED} The time is that between "
        "the ends of two backwards of the first stage."
    )
    return Report(f"{table(HEADER, lines)}\n{note}\n", data)


def _simulated(smaller: str) -> Report:
    inputs = TensorSpec((TABLE5_BATCH, 3, 32, 32), torch.float32)
    models = {name: build(stem="cifar") for name, build in MODELS.items()}
    plans = {name: make_plan(model, inputs) for name, model in models.items()}
    flops = {name: stage_costs(plans[name], count_blocks(model, inputs)) for name, model in models.items()}
    # One unknown, the speed of a device, is chosen such that one of the four printed times is exact.
    reference = predict(flops["revnet18"], METHODS["reversible"]).period / (TABLE5["revnet18"][0] / 1000)
    lines, data = [], {}
    for name, model in models.items():
        counted = flops[name]
        times = {method: 1000 * predict(counted, METHODS[method]).period / reference for method in ("reversible", "petra")}
        processor = speed_up(_processor_costs(model, plans[name]))
        ours = [f"{times[method]:.1f}" for method in ("reversible", "petra")]
        devices = len(plans[name].stages)
        lines.append([name, str(devices), *_printed(name), *ours, f"{speed_up(counted):.2f}", f"{processor:.2f}"])
        data[name] = {"milliseconds": times, "speed_up_flops": speed_up(counted), "speed_up_measured": processor}
    note = (
        f"Ours: `scale=cpu`, {smaller}. {HOW_TIMED} Our times count FLOPs on devices of {reference / 1e12:.2f} TFLOP/s, with which "
        "RevNet-18's reversible backpropagation takes the printed time; links are infinitely fast. The paper's caption speaks of "
        "three models, its table has two rows."
    )
    header = (*HEADER, "speed-up, ours, costs of this processor")
    return Report(f"{table(header, lines)}\n{note}\n", data)


def _printed(model: str) -> list[str]:
    """Return the paper's two times and their ratio; RevNet-50 has no row in the paper."""
    return [f"{value}" for value in TABLE5[model]] if model in TABLE5 else ["–"] * 3


def _processor_costs(model: Model, plan: Plan) -> list[StageCost]:
    """Return the costs of the stages as measured on this processor with 16 images."""
    optimizer = partial(sgd, momentum=0.9, nesterov=True, weight_decay=5e-4)
    inputs = TensorSpec((16, 3, 32, 32), torch.float32)
    profiled = profile_blocks(model, inputs, optimizer=optimizer, numerics=Numerics(channels_last=True), rounds=3)
    return stage_costs(plan, [replace(cost, update=0.0) for cost in profiled])
