"""Settings that are ``auto``: measured in one process, chosen there, and the same in all."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from launch.run import recipe
from launch.run.build import Plan
from launch.runtime.rank import Process
from petra.cost_model.autotune import Tuned, tune
from petra.cost_model.costs import measure_link, profile_blocks
from petra.distributed import raise_on_all_ranks
from petra.errors import ConfigError
from petra.method import Keep
from petra.plan.layout import Layout
from petra.settings import TransportName


def tuned(plan: Plan, place: Process) -> Plan:
    """The plan with what is ``auto`` chosen; every process makes the call, after it has joined the others.

    The first process measures each block's F, B and update on its device, and the link to the second.

    Raises:
        ConfigError: no cut fits the memory limit; in every process.
    """
    if not plan.auto:
        return plan
    trainer = plan.config.trainer
    link = measure_link(plan.device)
    if plan.wire is not None:  # of float32 streams
        link = replace(link, bandwidth=link.bandwidth * torch.float32.itemsize / plan.wire.itemsize)
    chosen: list[Tuned | None] = [None]
    with raise_on_all_ranks():
        if place.first:
            blocks = profile_blocks(
                plan.model,
                plan.layout.inputs,
                optimizer=recipe.optimizer(plan.config),
                device=plan.device,
                autocast=plan.autocast,
                channels_last=trainer.channels_last,
                seed=plan.config.seed,
            )
            # In one process delays are chosen as if each stage had its own: there they save nothing.
            chosen[0] = tune(
                blocks,
                plan.method,
                plan.config.k,
                len(plan.layout.processes) if "stages" in plan.auto else [len(stage) for stage in plan.layout.stages],
                tune_delay="delay" in plan.auto,
                transport=cast(TransportName, trainer.transport),
                optimizer_copies=_copies(plan),
                tune_keep="keep" in plan.auto and _may_keep_graphs(plan),
                limit=float("inf") if trainer.memory_limit is None else 1e9 * trainer.memory_limit,
                link=link,
                processes=[p for p in plan.layout.processes if p] if len(plan.layout.processes) > 1 else None,
            )
    if place.world > 1:
        dist.broadcast_object_list(chosen, 0)
    found = chosen[0]
    assert found is not None
    if place.first:
        times = ", ".join(f"{1e3 * (cost.forward + cost.backward):.3g}" for cost in found.costs)
        print(
            f"chosen: stages={list(found.stages)}, delay={found.delay}, keep={found.keep}; F + B of the stages: {times} ms, "
            f"slowest over mean {found.imbalance:.2f}",
            flush=True,
        )
    method = replace(plan.method, delay=found.delay, keep=found.keep)
    stages = list(found.stages)
    layout = Layout.plan(plan.model, plan.inputs, stages, place.world, plan.config.dp)
    return replace(plan, stages=stages, layout=layout, method=method, auto=frozenset())


def _copies(plan: Plan) -> int:
    """Of the parameters that a stage holds: weights, gradients, the optimizer's states, a moving average."""
    states = {"adam": 2, "adamw": 2}.get(plan.config.optim.name, 1)
    return 2 + states + (plan.config.optim.ema is not None)


def _may_keep_graphs(plan: Plan) -> bool:
    """Whether the method, the precision and the remedy go with graphs; if not, ``method.keep=auto`` is nothing."""
    method, k = replace(plan.method, keep=Keep.GRAPH), plan.config.k
    try:
        method.check(method.delays(len(plan.layout.stages), k), k, casts=plan.autocast is not None)
        plan.remedy(microbatches_per_epoch=1).check(method)
    except ConfigError:
        return False
    return True
