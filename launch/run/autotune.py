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
from petra.errors import require

from ..config.machines import read_machines
from ..runtime.rank import Process
from .build import Choices, Setup
from .dry_run import stage_memories
from .targets import factory


def tune_setup(setup: Setup, process: Process, earlier: Choices | None = None) -> Setup:
    """Return the setup with a value for each setting that is ``auto``. Every rank must call this in the process group.

    Rank 0 measures forward, backward and update of each block on its device. Ranks 0 and 1 measure the link between them.

    Args:
        setup: Configuration and plan.
        process: This process.
        earlier: Choices in the checkpoint that the run resumes from. They are taken unless the configuration has other stages.

    Raises:
        ConfigError: If no partition fits the memory limit. Raised on every rank.
    """
    if not setup.auto:
        return setup
    if earlier is not None and ("stages" in setup.auto or setup.choices["stages"] == earlier["stages"]):
        delay = earlier["delay"]
        return setup.with_choice(
            earlier["stages"], replace(setup.plan.method, delay=delay if isinstance(delay, int) else (*delay,))
        )
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
        print(f"chosen: stages={list(found.stages)}, delay={found.delay}; F + B of the stages: {times} ms", flush=True)
    return setup.with_choice(list(found.stages), replace(setup.plan.method, delay=found.delay))


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
    processes, several = plan.layout.processes, len(plan.layout.processes) > 1
    require(len(processes) <= len(machines.devices), "cluster.machines", f"{len(processes)} devices", len(machines.devices))
    # In one process the choice of delays would not change the speed, so choose as for one process per stage.
    stages: int | list[int] = len(processes) if "stages" in setup.auto else [len(stage) for stage in plan.layout.stages]
    owners = [range(j, j + 1) for j in range(stages)] if isinstance(stages, int) else [owned for owned in processes if owned]
    owned_by = machines.devices if several else (Device(),) * len(owners)
    devices = [device for device, owned in zip(owned_by, owners, strict=False) for _ in owned]
    links = machines.connections[: len(owners) - 1] if several else INSTANT

    def search(limits: Sequence[float] | None = None) -> Tuned:
        return tune(
            blocks,
            plan.method,
            plan.k,
            stages,
            tune_delay="delay" in setup.auto,
            speeds=[device.speed for device in devices],
            limits=limits,
            link=links,
            processes=owners if several else None,
            transport=config.trainer.transport,
            device_type=setup.device.type,
        )

    limit = float("inf") if config.trainer.memory_limit is None else 1e9 * config.trainer.memory_limit
    available = [min(limit, device.memory) for device in devices]
    if min(available) == float("inf"):
        return search()
    memories = partial(stage_memories, setup, {}, plan.method)
    found, _ = search_within(available, search, memories, "trainer.memory_limit", "stage")
    return found
