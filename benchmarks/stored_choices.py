"""What the blocks of two stages store, for :mod:`benchmarks.pipelines`: chosen within a limit, or written by hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.two_stages import build, sgd
from launch.bench.contestants import Batches, Setting
from petra import METHODS, ConfigError, Keep, Method, Model, Numerics, Plan, Recipe, TensorSpec, make_plan
from petra.cost_model.autotune import Tuned, setting_of
from petra.cost_model.costs import BlockCost, with_copies
from petra.cost_model.keeps import count_memory, tune_keeps
from petra.cost_model.machines import Device, Link
from petra.cost_model.memory import WORKSPACE, PredictedMemory, predict_memory
from petra.cost_model.simulator import predict
from petra.cost_model.stage_memory import Known
from petra.models import revgpt
from petra.plan.partition import partition_of

LANGUAGE = {"classes": 256, "dim": 128, "heads": 4, "size": 64}
"""Shape of the language model, whose layers cost about as much as the couplings of the other network."""


class Work(NamedTuple):
    """A network in two stages.

    Attributes:
        stages: Number of blocks in each stage.
        classes: Number of classes, or of different tokens.
    """

    model: Model
    inputs: TensorSpec
    stages: list[int]
    classes: int

    def plan(self, k: int, method: Method | str = "petra") -> Plan:
        """Return the plan of the two stages, each in a process."""
        return make_plan(
            self.model,
            self.inputs,
            method=method,
            k=k,
            stages=self.stages,
            processes=2,
            numerics=Numerics(channels_last=True),
            transport="edge",
        )

    def setting(self, rank: int, k: int, threads: int = 1) -> tuple[Setting, Batches]:
        """Return the work of the contestants in one of the processes."""
        return Setting(self.plan(k), rank, sgd, threads=threads), Batches(self.inputs, k, self.classes)


def _language(options: argparse.Namespace) -> Work:
    model, stages = revgpt(depth=2 * options.blocks, **LANGUAGE), [options.blocks + 1] * 2
    return Work(model, TensorSpec((options.batch, LANGUAGE["size"]), torch.int64), stages, LANGUAGE["classes"])


WORKS: dict[str, Callable[[argparse.Namespace], Work]] = {
    "revnet": lambda options: Work(*build(options), 10),
    "language": _language,
}


class Predicted(NamedTuple):
    """Seconds per microbatch and bytes of each process of a setting."""

    period: float
    bytes: list[int]


class Chooser:
    """Chooses and predicts what blocks store.

    Args:
        blocks: Costs of the blocks, measured in both processes at the same time.
        link: The link between the processes.
    """

    def __init__(self, work: Work, k: int, blocks: Sequence[BlockCost], link: Link) -> None:
        self.work, self.k, self.blocks, self.link = work, k, blocks, link
        self.recipe, self.known = Recipe(sgd, metrics={}), Known()
        self.targets = TensorSpec(tuple(work.setting(0, k)[1].targets(0).shape), torch.int64)

    def choose(self, delay: int, limits: Sequence[int]) -> Method | None:
        """Return PETRA with what is fastest within a limit of each stage; None if nothing fits.

        A limit is one of tensors: the planner's allowance for workspaces of libraries is added to it.
        """
        method = replace(METHODS["petra"], delay=delay)
        memory = count_memory(self.work.plan(self.k, method), self.recipe, self.targets, self.known)
        devices, predict_own = [Device(memory=limit + WORKSPACE) for limit in limits], partial(self._memory, method)
        try:
            found, _ = tune_keeps(
                self.blocks, memory, method, self.k, self.work.stages, devices, predict_own, "", link=self.link, transport="edge"
            )
        except ConfigError:
            return None
        assert found.keep is not None
        return replace(method, keep=found.keep)

    def predict(self, method: Method) -> Predicted:
        """Predict the period, and the bytes without workspaces."""
        costs = setting_of(self.blocks, partition_of(self.work.stages), method, self.k, [1.0, 1.0]).costs
        period = predict(with_copies(costs, self.link.bandwidth), method, self.k, link=self.link, transport="edge").period
        return Predicted(period, [found.tensors for found in self._memory(method)])

    def _memory(self, method: Method, tuned: Tuned | None = None) -> list[PredictedMemory]:
        method = method if tuned is None else replace(method, keep=tuned.keep)
        return predict_memory(self.work.plan(self.k, method), self.recipe, self.targets, self.known, device_type="cpu")


def by_hand(blocks: int, delay: int) -> Iterator[tuple[str, Method]]:
    """Yield six settings from all graphs to nothing. Their names tell the graphs at the end of stage 1, and what stage 2 stores."""
    counts = sorted({blocks, 3 * blocks // 4, blocks // 2, blocks // 4, 0}, reverse=True)
    for count, last in [*((count, Keep.GRAPH) for count in counts), (0, Keep.NOTHING)]:
        stem = Keep.GRAPH if count == blocks else Keep.INPUT
        keep = (stem, *[Keep.NOTHING] * (blocks - count), *[Keep.GRAPH] * count, *[last] * blocks, Keep.GRAPH)
        yield f"d = {delay}, {count} of {blocks} graphs, {last}", Method("petra", delay, keep)
