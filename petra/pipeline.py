"""A model trained as a pipeline of stages: the same calls in one process and in many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from petra.distributed import all_gather_objects, bind_device, raise_on_all_ranks
from petra.engine.build import build_stages, build_workers, when_completed
from petra.engine.checks import left_by, marks_of
from petra.engine.endpoints import DataPort, DataSource, LossPort, require_source
from petra.engine.executor import Executor
from petra.engine.metrics import size_of
from petra.engine.options.finite_check import check_drained
from petra.engine.recipe import Recipe
from petra.engine.stage import evaluating
from petra.engine.totals import Result
from petra.errors import ModelError, NumericsError, invalid, require
from petra.hooks import Hook, Hooks
from petra.method import Method
from petra.model import Model
from petra.plan import Plan, make_plan
from petra.plan.timetable import evaluation_rounds
from petra.reversible.replay import NOTHING
from petra.settings import Numerics, Runtime
from petra.specs import TensorSpec
from petra.transport import check_ranks_agree, connect, open_transport

if TYPE_CHECKING:
    from petra.engine.options.replicas import Replicas

DEFAULT = Runtime()
log = logging.getLogger(__name__)


class Pipeline:
    """A model that is split into stages and trained by a method.

    With ``torch.distributed`` initialized, each rank builds only its own stages, and every rank makes the same calls.

    Args:
        model: The model.
        inputs: Spec of one microbatch of data, of all replicas together.
        recipe: Optimizer, learning rate, loss, metrics, seed, update rules and extensions.
        method: A name from :data:`petra.method.METHODS`, or a :class:`petra.method.Method`.
        k: Microbatches per update; their gradients are averaged. Each microbatch counts alike, however many targets it has: the
            update is a mean of means. :class:`petra.training.mean_over_targets.MeanOverTargets` makes it a mean over targets.
        stages: Number of stages; None for one per block; or the number of blocks in each stage.
        dp: Number of replicas. Each takes an equal share of every microbatch (docs/data_parallel.md).
        numerics: Number formats and memory layouts.
        runtime: Device, transport and compilation.

    Attributes:
        plan: Layout, schedule and messages, as plain data.
        recipe: As given.
        device, rank, world: Device and rank of this process, and number of ranks; 0 and 1 without ``torch.distributed``.
        replica: Index of the replica that this rank belongs to.
        replicas: All-reduces over replicas; None if there is only one replica.
        stages, workers: Stages of this rank, and their workers, by index.
        loss_port: Port after the last stage, which computes the loss.
        runtime: Device, transport and compilation, as given.
        microbatches_done: Number of microbatches trained since the start.
        hooks: Hooks that observe training.
        measures: Functions whose results :meth:`stage_metrics` includes. Each returns metrics of this rank's stages since its
            last call, by name.

    Raises:
        ConfigError, ModelError: If arguments are invalid. Raised before any block is built.
    """

    def __init__(
        self,
        model: Model,
        inputs: TensorSpec,
        recipe: Recipe,
        *,
        method: str | Method = "petra",
        k: int = 1,
        stages: int | Sequence[int] | None = None,
        dp: int = 1,
        numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
        runtime: Runtime = Runtime(),  # noqa: B008
    ) -> None:
        for name, group, kind in (("recipe", recipe, Recipe), ("numerics", numerics, Numerics), ("runtime", runtime, Runtime)):
            require(isinstance(group, kind), name, f"a {kind.__name__}", repr(group))
        plan = make_plan(
            model,
            inputs,
            method=method,
            k=k,
            stages=stages,
            processes=dist.get_world_size() if dist.is_initialized() else 1,
            dp=dp,
            tp=runtime.tp,
            numerics=numerics,
            transport=runtime.transport,
            device_type=torch.device(runtime.device).type,
            metrics=sum(map(size_of, recipe.metrics.values())),
            refetch=runtime.refetch,
        )
        self._build(plan, recipe, runtime)

    @classmethod
    def from_plan(cls, plan: Plan, recipe: Recipe, runtime: Runtime = DEFAULT, replicas: Replicas | None = None) -> Pipeline:
        """Build the pipeline of a plan for the current ranks. Pass ``replicas`` if some of them take no part or may be lost."""
        pipeline = cls.__new__(cls)
        pipeline._build(plan, recipe, runtime, replicas)
        return pipeline

    def _build(self, plan: Plan, recipe: Recipe, runtime: Runtime, replicas: Replicas | None = None) -> None:
        recipe.check(plan)
        self.plan, self.recipe, self.runtime = plan, recipe, runtime
        device = self.device = bind_device(runtime.device)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        position, process = plan.layout.locate(self.rank)
        self.replica = position if replicas is None else replicas.replica
        self.hooks, self.microbatches_done = Hooks(), 0
        self.measures: list[Callable[[], Mapping[str, Any]]] = []
        loss_port, self.replicas, self._may_change = LossPort, replicas, replicas is not None
        check_ranks_agree({**plan.settings(), **recipe.settings()}, plan)
        if plan.layout.dp * plan.layout.tp > 1:
            from petra.engine.options.replica_kinds import replicas_of

            loss_port, self.replicas = replicas_of(plan, recipe, runtime, device, position, replicas)
        self.loss_port = loss_port(self.device, recipe.losses, recipe.metrics)
        totals, channels_last = torch.zeros_like(self.loss_port.totals), plan.numerics.channels_last
        self._source = DataPort(plan.layout.inputs, device, channels_last, totals, plan.layout.dp)
        place, group = (self.replica, process), None if self.replicas is None else self.replicas.pipeline_group
        with raise_on_all_ranks():
            divided = plan if self.replicas is None else self.replicas.divided(plan)
            self.stages = build_stages(divided, recipe, runtime, device, place, self._source.refetch)
        if not all(boundary.backward_bytes for boundary in plan.boundaries):
            from petra.engine.options.frozen import without_gradients

            self.stages = without_gradients(self.stages, plan)
        if self.replicas is not None:
            self.replicas.share_weights(self.stages.values())
        transport = open_transport(plan, self.device, group)
        ports = connect(plan.layout.processes[process], self._source, self.loss_port, plan.boundaries, transport)
        with raise_on_all_ranks():
            self.workers = build_workers(plan, recipe, self.stages, ports, self.device)
        for part in (part for worker in self.workers.values() for part in worker.update.parts if isinstance(part, Hook)):
            self.hooks.append(part)
        if self.replicas is not None:
            self.replicas.attach([*self.workers.values()], self.hooks, transport)
        on_completed = when_completed(plan, recipe, self.workers, device, group)
        self._executor = Executor(plan, self.workers, transport, self.hooks, on_completed)
        self.left = left_by(self.workers.values())
        self.noticed = {"modes", "gradients", "parameters", "buffers"} if self.replica else set[str]()

    def train(
        self,
        data: DataSource,
        microbatches: int,
        on_microbatch: Callable[[Tensor], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Result:
        """Train on the next ``microbatches`` microbatches, drain the pipeline, and return the same result on every rank.

        Args:
            data: Source of inputs and targets.
            microbatches: Number of microbatches.
            on_microbatch: Called on the rank of the first stage with the report of each completed microbatch: a float64 tensor
                (2 + metrics,) on the device, with the number of targets, the summed loss and the summed metrics. With replicas,
                it is called in each replica, with the report of the replica's share multiplied by the number of replicas.
            stop: Polled during the run. Soon after it returns True on any rank, the pipeline drains on all ranks, and
                :attr:`microbatches_done` is the number of microbatches done. Pass it on every rank or on none.

        Raises:
            ModelError: If no parameter requires a gradient, or exact streams exceeded their grid. Raised on every rank.
            NumericsError: If a loss, a gradient or running statistics are not finite (:class:`petra.UpdateRules`).
        """
        start = self.microbatches_done
        call = f"Pipeline.train({microbatches} microbatches, stop={'None' if stop is None else 'a function'})"
        with self._called(call):
            self._set_data(data, start, microbatches, training=True)
        if any(marks != marks_of(worker) for worker, marks, _ in self.left):
            from petra.engine.options.between_calls import notice_changes

            notice_changes(self.left, self.noticed, modes=True)
        self.left = []  # a call that fails leaves nothing to compare with
        self._source.on_microbatch = on_microbatch
        for begin in self.hooks.calls("train_begin"):
            begin(start, start + microbatches)
        rounds, early = self._executor.prepare(start, start + microbatches, stop)
        with self._executor.observing():
            self._executor.run(rounds, microbatches, training=True, early=early)
        self.microbatches_done += microbatches - (0 if early is None else early.finish())
        for end in self.hooks.calls("train_end"):
            end()
        if self.replicas is not None:
            self.replicas.synchronize()
        check_drained(self.plan, self.workers, self.device)
        self.left = left_by(self.workers.values())
        done, k, watched = self.microbatches_done, self.plan.k, bool(on_microbatch or stop)
        if 0 < done < k and self.rank == 0 and not watched:  # a caller that watches or stops training may end a call on purpose
            log.warning("k=%d: no update yet, after %d microbatches; the weights have not changed", k, done)
        result = self._result(self._source.totals)
        if not (isfinite(result.loss) or self.recipe.rules.may_skip):
            where = f"stage {len(self.plan.stages)}: the loss is not finite in microbatches {start + 1} to {done}"
            raise NumericsError(f"{where}; lower optim.lr or set optim.clip", origin=self.rank == 0)  # one rank is to report it
        return result

    def evaluate(self, data: DataSource, microbatches: int) -> Result:
        """Evaluate microbatches 0 to ``microbatches`` - 1, with averaged weights if the rules ask for averages."""
        with self._called(f"Pipeline.evaluate({microbatches} microbatches)"):
            microbatches = self._set_data(data, 0, microbatches, training=False)
        with self.averaged(), evaluating(self.stages.values()):
            self._executor.run(evaluation_rounds(self.plan.boundary_delays, microbatches), microbatches, training=False)
        result = self._result(self.loss_port.totals)
        if self.rank == 0 and microbatches and not (result.targets and isfinite(result.loss)):
            log.warning("evaluation: expected targets with a finite loss, got %d with the loss %s", result.targets, result.loss)
        return result

    def _result(self, totals: Tensor) -> Result:
        """All-reduce a sum of reports, and return its result."""
        totals = totals.cpu()
        if self.replicas is not None:
            self.replicas.total(totals)
        elif self.world > 1:
            dist.all_reduce(totals)
        return Result.of(totals.tolist(), self.recipe.metrics)

    def averaged(self) -> AbstractContextManager[None]:
        """Use the moving averages of this rank's weights inside the ``with`` block, if the rules ask for averages."""
        if self.recipe.rules.average is None:
            return NOTHING
        from petra.engine.options.averaging import averaged

        return averaged([worker.update for worker in self.workers.values()])

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name and the module of each block of this rank, in the order of the model."""
        for j in self.stages:
            yield from self.blocks_of(j)

    def blocks_of(self, j: int) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name and the module of each block of stage ``j`` (from 0), which is one of this rank."""
        yield from zip((self.plan.model.blocks[b].name for b in self.plan.stages[j].blocks), self.stages[j].module, strict=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers of this rank's blocks, with the keys and shapes of :class:`petra.model.Chain`."""
        return {f"{name}.{key}": value for name, block in self.blocks() for key, value in block.state_dict().items()}

    def stage_metrics(self) -> dict[str, Any]:
        """All-gather the metrics of the first replica's stages since the last call, as ``stage/<j>/<name>`` with j from 1."""
        own = {f"stage/{j + 1}/{key}": v for j, worker in self.workers.items() for key, v in worker.update.metrics().items()}
        measured = {key: value for measure in self.measures for key, value in measure().items()}
        gathered = all_gather_objects({**own, **measured}, call="Pipeline.stage_metrics()")
        ranks = len(self.plan.layout.processes) * self.plan.layout.tp
        return {key: value for part in gathered[:ranks] for key, value in part.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a :meth:`state_dict` of at least this rank's blocks, and restart moving averages, older weights and extensions.

        Raises:
            ModelError: If a key belongs to no block, or an entry is missing or has another shape. The message names the block.
        """
        from petra.engine.options.between_calls import renew
        from petra.engine.options.loading import load_blocks

        load_blocks(self.plan.model, dict(self.blocks()), state)
        for worker in self.workers.values():
            worker.stage.resume(worker.microbatches_done // self.plan.k, {})
            for part in worker.update.parts:
                part.resume({})
        renew(self.left, "parameters", "buffers")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies: parts of a pipeline refer to each other by identity, so that a copy would be broken."""
        expected = "a new one with its arguments, and load_state_dict, or a copy of the modules that blocks() yields"
        raise invalid("Pipeline", expected, "a copy or a pickle of one")

    def __repr__(self) -> str:
        return f"Pipeline({self.plan}, rank {self.rank} of {self.world}, {self.microbatches_done} microbatches done)"

    def _called(self, call: str) -> AbstractContextManager[None]:
        """Return the context of a call's start. The ranks of replicas that may be lost are not checked."""
        return NOTHING if self._may_change else raise_on_all_ranks(call=call)

    def _set_data(self, data: DataSource, start: int, microbatches: int, *, training: bool) -> int:
        trains = not training or any(block.trained for block in self.plan.layout.profiles)
        require(trains, "model", "a parameter that requires a gradient", "none", ModelError)
        require_source(data, microbatches, refetches=training and self.plan.refetches)
        if self.replicas is not None:
            data, microbatches = self.replicas.share(data, microbatches, evaluation=not training)
        for port in (self._source, self.loss_port):
            port.start(data, start, microbatches, training=training)
        return microbatches
