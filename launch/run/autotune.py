"""Auto-tuning: rank 0 chooses the settings that are ``auto`` from measurements, and all ranks use its choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from petra.cost_model.autotune import Tuned, search_within, tune
from petra.cost_model.costs import profile_blocks
from petra.cost_model.machines import INSTANT, Device, Machines, measure_link
from petra.distributed import raise_on_all_ranks
from petra.errors import ConfigError, require
from petra.method import Keep, Method

from ..config.machines import read_machines
from ..runtime.rank import Process
from .build import Setup
from .dry_run import stage_memories
from .targets import factory


def tune_setup(setup: Setup, process: Process) -> Setup:
    """Return the setup with a value for each setting that is ``auto``. Every rank must call this in the process group.

    Rank 0 measures forward, backward and update of each block on its device. Ranks 0 and 1 measure the link between them.

    Raises:
        ConfigError: If no partition fits the memory limit. Raised on every rank.
    """
    if not setup.auto:
        return setup
    path = setup.config.cluster.machines
    machines = _measured(setup) if path is None else read_machines(path)
    chosen: list[Tuned | None] = [None]
    with raise_on_all_ranks():
        if process.first:
            chosen[0] = _choose(setup, machines)
    if process.world > 1:
        dist.broadcast_object_list(chosen, 0)
    found = chosen[0]
    assert found is not None
    if process.first:
        times = ", ".join(f"{1e3 * (cost.forward + cost.backward):.3g}" for cost in found.costs)
        print(
            f"chosen: stages={list(found.stages)}, delay={found.delay}, keep={found.keep}; F + B of the stages: {times} ms, "
            f"slowest over mean {found.imbalance:.2f}",
            flush=True,
        )
    return setup.with_choice(list(found.stages), _chosen_method(setup, found))


def _measured(setup: Setup) -> Machines:
    """Return equal devices with the link between ranks 0 and 1, which is measured."""
    return Machines.equal(len(setup.plan.layout.processes), measure_link(setup.device))


def _choose(setup: Setup, machines: Machines) -> Tuned:
    plan, config = setup.plan, setup.config
    blocks = profile_blocks(
        plan.model,
        plan.layout.inputs,
        optimizer=factory("optim", config.optim),
        device=setup.device,
        numerics=plan.numerics,
        seed=config.seed,
    )
    processes = plan.layout.processes
    used = [stages for stages in processes if stages]
    require(len(processes) <= len(machines.devices), "cluster.machines", f"{len(processes)} devices", len(machines.devices))
    limit = float("inf") if config.trainer.memory_limit is None else 1e9 * config.trainer.memory_limit
    count = len(processes) if "stages" in setup.auto else len(plan.layout.stages)
    several = len(processes) > 1
    owners = [range(j, j + 1) for j in range(count)] if "stages" in setup.auto else used
    devices = (
        [device for device, owner in zip(machines.devices, owners, strict=False) for _ in owner] if several else (Device(),) * count
    )
    # Graphs are stored where there is memory, so each stage of a process gets an equal part of it.
    divided = several and "keep" in setup.auto
    sharing = [len(owner) for owner in owners for _ in owner] if divided else [1] * count
    limits = [min(limit, device.memory / stages) for device, stages in zip(devices, sharing, strict=True)]

    def search(limits: Sequence[float]) -> Tuned:
        return tune(
            blocks,
            plan.method,
            plan.k,
            len(processes) if "stages" in setup.auto else [len(stage) for stage in plan.layout.stages],
            tune_delay="delay" in setup.auto,
            tune_keep="keep" in setup.auto and _may_keep_graphs(setup),
            devices=[replace(device, memory=limit) for device, limit in zip(devices, limits, strict=True)],
            link=machines.connections[: len(owners) - 1] if several else INSTANT,
            # In one process the choice of delays would not change the speed, so choose as for one process per stage.
            processes=owners if several else None,
            transport=config.trainer.transport,
            device_type=setup.device.type,
            parameter_copies=_parameter_copies(setup),
        )

    if min(limits) == float("inf"):
        return search(limits)
    memories, key = partial(stage_memories, setup, {}), "trainer.memory_limit"
    found, _ = search_within(limits, search, lambda t: t.memory, lambda t: memories(_chosen_method(setup, t), t), key, "stage")
    return found


def _chosen_method(setup: Setup, found: Tuned) -> Method:
    return replace(setup.plan.method, delay=found.delay, keep=found.keep)


def _parameter_copies(setup: Setup) -> int:
    """Return how many tensors a stage has per parameter: weight, gradient, optimizer states and moving average."""
    optim = setup.config.optim
    states = {"adam": 2, "adamw": 2}.get(optim.name, 1)
    return 2 + states + (optim.rules["average"] is not None)


def _may_keep_graphs(setup: Setup) -> bool:
    """Return whether method, precision and remedy allow ``method.keep=graph``. Otherwise auto-tuning uses ``nothing``."""
    plan = setup.plan
    method = replace(plan.method, keep=Keep.GRAPH)
    try:
        method.check(plan.delays, plan.k, autocast=plan.numerics.autocast is not None)
        setup.recipe().check(method, plan.delays)
    except ConfigError:
        return False
    return True
