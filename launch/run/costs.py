"""What a plan costs: tables of stages and memory, which a dry run prints without building the model, and auto-tuning."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch

from petra.cost_model.autotune import Tuned, search_within, tune
from petra.cost_model.costs import profile_blocks
from petra.cost_model.keeps import BlockMemory, count_memory, tune_keeps
from petra.cost_model.machines import INSTANT, Device, Machines, measure_link
from petra.cost_model.memory import PredictedMemory, predict_memory
from petra.cost_model.stage_memory import Known
from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import ConfigError, require
from petra.method import Keep, Method
from petra.plan import Plan
from petra.specs import TensorSpec

from ..config.machines import read_machines
from ..config.schema import AUTO
from ..runtime.rank import Process
from ..runtime.terminal import table
from .build import Setup
from .targets import optimizer_factory

log = logging.getLogger(__name__)

STAGES = ("stage", "process", "blocks", "parameters", "FLOPs", "τ", "stores", "MB →", "MB ←")
MEMORY_PARTS = ("weights", "gradients", "optimizer", "stored", "temporary", "workspace")
"""Columns of the table of memory: fields of :class:`petra.cost_model.memory.PredictedMemory`."""


def stage_facts(plan: Plan) -> list[dict[str, Any]]:
    """Return the entry of each stage in summary.json. FLOPs and bytes are of one microbatch, or of a replica's share of it."""
    processes, found = plan.layout.processes, []
    messages = [*((boundary.forward_bytes, boundary.backward_bytes) for boundary in plan.boundaries), (0, 0)]
    for stage, (forward, backward) in zip(plan.stages, messages, strict=True):
        owner = next(process for process, stages in enumerate(processes) if stage.index in stages)
        names, keeps = [profile.name for profile in stage.profiles], Counter(map(str, stage.keeps))
        found.append(
            {
                "stage": stage.index + 1,
                "processes": [*range(owner, len(processes) * plan.layout.dp, len(processes))],
                "blocks": names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}",
                "parameters": stage.parameters,
                "flops": stage.flops,
                "stores": ", ".join(f"{count} {keep}" if len(keeps) > 1 else keep for keep, count in keeps.items()),
                "delay": stage.delay,
                "staleness": stage.staleness,
                "in_flight": stage.in_flight,
                "forward_bytes": forward,
                "backward_bytes": backward,
            }
        )
    return found


def stage_map(setup: Setup) -> str:
    """Return a Markdown table of the stages. Sizes are of one microbatch, or of a replica's share of it."""
    plan, dp, stages = setup.plan, setup.plan.layout.dp, stage_facts(setup.plan)
    flops = sum(stage["flops"] for stage in stages)
    provisional = f"; provisional {', '.join(sorted(setup.auto))}, which the run chooses (auto)" if setup.auto else ""
    rows = [
        [
            *(str(stage["stage"]), ", ".join(map(str, stage["processes"])), stage["blocks"], f"{stage['parameters']:,}"),
            *(f"{stage['flops'] / flops:.1%}", str(stage["delay"]), stage["stores"]),
            *(f"{stage[size] / 1e6:.2f}" for size in ("forward_bytes", "backward_bytes")),
        ]
        for stage in stages
    ]
    title = (
        f"{plan.model.name} on {setup.config.data.name} by {plan.method.name} (d = {plan.method.delay}, k = {plan.k}): "
        f"{len(rows)} stages in {len(plan.layout.processes)} process(es){f' per replica, {dp} replicas' if dp > 1 else ''}, "
        f"{plan.parameters:,} parameters, {dp * flops / 1e9:.3g} GFLOPs forward for a microbatch of {plan.inputs}{provisional}"
    )
    return f"{title}\n\n{table(STAGES, rows, aligned=True)}"


def memory_table(setup: Setup) -> str:
    """Return a Markdown table with the memory that stages and processes of a replica would reach on a GPU, in MB (10^6 bytes).

    A process with several stages has a row for each, and one for all of them, whose temporary memory is that of one step.
    Auto-tuned settings have provisional values. Takes seconds, without a GPU and without the memory that it predicts.
    """
    rows, device_type = [], "cpu" if setup.config.trainer.device == "cpu" else "cuda"
    if device_type == "cuda" and (setup.config.trainer.transport, setup.plan.transport) == ("auto", "edge"):
        setup = replace(setup, plan=replace(setup.plan, transport="lockstep"))  # what auto selects on GPUs
    predicted = _memory(setup, {}, device_type)
    for process, (stages, found) in enumerate(zip(setup.plan.layout.processes, predicted, strict=True)):
        shown = {str(j + 1): found.stages[j] for j in stages} if len(stages) > 1 else {}
        if stages:
            shown[str(stages[0] + 1) if len(stages) == 1 else f"{stages[0] + 1} … {stages[-1] + 1}"] = found
        for name, memory in shown.items():
            sizes = (*(getattr(memory, part) for part in MEMORY_PARTS), memory.total)
            rows.append([str(process), name, *(f"{size / 1e6:.1f}" for size in sizes)])
    return table(("process", "stage", *MEMORY_PARTS, "total (MB)"), rows, aligned=True)


def stage_memories(
    setup: Setup, known: Known, method: Method, tuned: Tuned, *, device_type: str | None = None
) -> list[PredictedMemory]:
    """Predict the memory of each stage of a method with a chosen partition and delay, on a device of its own. Nothing is allocated.

    Args:
        known, device_type: As for :func:`petra.cost_model.memory.predict_memory`; by default, the device of the setup.
    """
    config = replace(setup.config, trainer=replace(setup.config.trainer, transport=AUTO))  # that of one process may be local
    several = replace(setup, config=config, processes=len(tuned.stages) * config.dp)
    return _memory(several.with_choice(tuned.stages, tuned.delay, method, tuned.keep), known, device_type)


def block_memories(setup: Setup, known: Known, method: Method) -> list[BlockMemory]:
    """Count the memory of each block, for all that it may store with a method. A line says why no block may store its graph.

    Args:
        known: As for :func:`petra.cost_model.memory.predict_memory`.
    """
    recipe, plan, graphs = setup.recipe(), setup.plan, True
    try:
        recipe.check(replace(plan, method=replace(method, keep=Keep.GRAPH)))
    except ConfigError as error:
        print(f"method.keep=auto: no graphs ({error})", flush=True)
        graphs = False
    return count_memory(replace(plan, method=method), recipe, _targets(setup), known, graphs=graphs)


def _memory(setup: Setup, known: Known, device_type: str | None = None) -> list[PredictedMemory]:
    """Predict the memory of each process of a replica."""
    recipe = setup.recipe()
    recipe.check(setup.plan)
    return predict_memory(setup.plan, recipe, _targets(setup), known, device_type=device_type or setup.device.type)


def _targets(setup: Setup) -> TensorSpec:
    """Return the form of a microbatch's targets."""
    shape = setup.plan.layout.inputs.shape
    forms = {"images": shape[:1], "tokens": (math.prod(shape[:2]),), "pixels": (shape[0], *shape[2:])}
    return TensorSpec(forms[setup.unit], torch.int64)


def show_progress(text: str) -> None:
    """Show what is being done, on a terminal only, in place of what was shown before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def tune_setup(setup: Setup, process: Process, earlier: dict[str, Any] | None = None) -> Setup:
    """Return the setup with a value for each setting that is ``auto``. Every rank must call this in the process group.

    Rank 0 measures forward, backward and update of each block on its device. Ranks 0 and 1 measure the link between them.

    Args:
        setup: Configuration and plan.
        process: This process.
        earlier: Choices in the checkpoint that the run resumes from. Settings that are auto take them, unless the stages differ.

    Raises:
        ConfigError: If no partition fits the memory limit. Raised on every rank.
    """
    if not setup.auto:
        if process.first and setup.config.cluster.machines is not None:
            log.warning("cluster.machines is not used: no setting is auto (trainer.stages, method.delay, method.keep)")
        return setup
    earlier = earlier or {}
    kept = earlier.get("keep") if "keep" in setup.auto else None
    if kept is not None:
        with_kept = setup.with_choice(setup.choices["stages"], setup.plan.method.delay, keep=kept)
        limit = setup.config.trainer.memory_limit or earlier.get("limit")
        setup = replace(with_kept, auto=setup.auto - {"keep"}, limit=limit)
    same = "stages" in setup.auto or setup.choices["stages"] == earlier.get("stages")
    reused = bool(earlier) and same and "keep" not in setup.auto
    if reused:
        if process.first and setup.config.cluster.machines is not None:
            log.warning("cluster.machines is not used: the run resumes with the settings that were chosen when it started")
        setup = setup.with_choice(earlier["stages"], earlier["delay"] if "delay" in setup.auto else setup.plan.method.delay)
    setup = _tuned(setup, process) if setup.auto else setup
    if kept is not None or reused:
        with raise_on_all_ranks():
            _require_fits(setup)
    return setup


def _tuned(setup: Setup, process: Process) -> Setup:
    """Measure, and return the setup with a value for each setting that is ``auto``."""
    free = min(all_gather_objects(_free_memory(setup)))
    path, processes = setup.config.cluster.machines, len(setup.plan.layout.processes)
    machines = Machines.equal(processes, measure_link(setup.device)) if path is None else read_machines(path)
    with raise_on_all_ranks():
        chosen = _choose(setup, machines, free) if process.first else None
    found: Tuned = all_gather_objects(chosen)[0]
    limit = setup.limit if found.keep is None else setup.config.trainer.memory_limit or free
    if process.first:
        times = ", ".join(f"{1e3 * (cost.forward + cost.backward):.3g}" for cost in found.costs)
        stores = "" if found.keep is None else f", keep={_counted(found.keep)} within {limit:.3g} GB per stage"
        print(f"chosen: stages={list(found.stages)}, delay={found.delay}{stores}; F + B of the stages: {times} ms", flush=True)
    tuned = replace(setup.with_choice(found.stages, found.delay, keep=found.keep), limit=limit)
    if process.first and tuned.plan.numerics.stored_format != setup.config.trainer.stored_format:
        log.warning(
            "trainer.stored_format is not used: by the choice for method.keep=auto, no block after the first stores its input"
        )
    return tuned


def _counted(keeps: Sequence[Keep]) -> str:
    """Return what blocks store, equal ones in a row as one entry: ``3 graph, 2 nothing``."""
    return "[" + ", ".join(f"{len([*own])} {keep}" for keep, own in groupby(keeps)) + "]"


def _free_memory(setup: Setup) -> float:
    """Return the memory in GB that a stage of this process may need without ``trainer.memory_limit``: no limit on CPUs."""
    if setup.device.type != "cuda" or "keep" not in setup.auto:
        return float("inf")
    return 0.9 * torch.cuda.mem_get_info(setup.device)[0] / 1e9


def _require_fits(setup: Setup) -> None:
    """Check that stages fit the limit as they were, and with what their blocks stored, before the run was resumed."""
    choices, limit = setup.choices, setup.config.trainer.memory_limit or setup.limit
    if limit is not None:
        keep = tuple(map(Keep, choices["keep"])) if "keep" in choices else None
        tuned = Tuned(tuple(choices["stages"]), choices["delay"], (), (), keep)
        worst = max(memory.total for memory in stage_memories(setup, {}, setup.plan.method, tuned)) / 1e9
        what = "what blocks store in the checkpoint (method.keep)" if keep else "the stages in the checkpoint (trainer.stages)"
        expected = f"at least {worst:.3g} GB for {what}"
        require(worst <= limit, "trainer.memory_limit", expected, f"{limit:g} GB")


def _choose(setup: Setup, machines: Machines, free: float) -> Tuned:
    plan, config = setup.plan, setup.config
    blocks = profile_blocks(
        plan.model,
        plan.layout.inputs,
        optimizer=optimizer_factory(config.optim),
        device=setup.device,
        numerics=plan.numerics,
        seed=config.seed,
        compile=config.trainer.compile,
    )
    processes, several = plan.layout.processes, len(plan.layout.processes) > 1
    require(len(processes) == len(machines.devices), "cluster.machines", f"{len(processes)} devices", len(machines.devices))
    # In one process the choice of delays would not change the speed, so choose as for one process per stage.
    automatic = "stages" in setup.auto  # of which the provisional plan has one for each process, unless there are fewer blocks
    stages: int | list[int] = len(plan.layout.stages) if automatic else [len(stage) for stage in plan.layout.stages]
    owners = [range(j, j + 1) for j in range(stages)] if isinstance(stages, int) else [owned for owned in processes if owned]
    owned_by = machines.devices if several else [Device(memory=machines.devices[0].memory)] * len(owners)
    limit = 1e9 * (config.trainer.memory_limit or setup.limit or free)
    devices = [Device(d.speed, min(limit, d.memory)) for d, owned in zip(owned_by, owners, strict=False) for _ in owned]
    rules: dict[str, Any] = {
        "tune_delay": "delay" in setup.auto,
        "link": machines.connections[: len(owners) - 1] if several else INSTANT,
        "processes": owners if several else None,
        "transport": config.trainer.transport,
        "device_type": setup.device.type,
    }
    if "keep" in setup.auto:
        known: Known = {}
        memory, predict = block_memories(setup, known, plan.method), partial(stage_memories, setup, known, plan.method)
        return tune_keeps(blocks, memory, plan.method, plan.k, stages, devices, predict, "trainer.memory_limit", **rules)[0]
    search = partial(tune, blocks, plan.method, plan.k, stages, **rules)
    memories = partial(stage_memories, setup, {}, plan.method) if any(d.memory < math.inf for d in devices) else None
    return search_within(devices, search, memories, "trainer.memory_limit", "stage")[0]
