"""Builds the workers of this process from model, method and placement, and runs them: train, drain, evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from petra.engine.compile import compile_block
from petra.engine.data_parallel import Replicas, Share, ShareObjective, replica_seed
from petra.engine.endpoints import Loss, Losses, Metric, Objective, Source, Stream, correct
from petra.engine.executor import Executor, stage_threads
from petra.engine.stage import Stage
from petra.engine.update import OptimizerFactory, Update, UpdateRules
from petra.engine.worker import Worker
from petra.errors import ConfigError, NumericsError
from petra.hooks import Hooks
from petra.method import METHODS, Keep, Method, Weights
from petra.model import Model
from petra.plan.layout import Layout
from petra.plan.schedule import check, training_orders
from petra.reversible import Grid
from petra.settings import Numerics, Runtime
from petra.specs import TensorSpec
from petra.staleness.remedies import Remedy, StageRemedy
from petra.transport import Port
from petra.transport.connect import agree, boundary, choose_transport, connect, open_transport


@dataclass(frozen=True)
class Result:
    """Means over the targets of one run of the pipeline."""

    targets: int
    loss: float
    metrics: dict[str, float]


class Pipeline:
    """A model split over stages and trained by one of the methods; the same code in one process and in many.

    In many processes (``torch.distributed`` initialised) each builds only its own stages, and every process makes the same calls.

    Args:
        model: the blocks.
        inputs: form of one microbatch of data, of all replicas together.
        method: a name from :data:`petra.method.METHODS`, or one's own switches.
        remedy: what is done about stale gradients; nothing by default.
        k: microbatches per update; gradients are averaged.
        stages: how many; None for one for each block; or the number of blocks in each.
        optimizer: from a stage's blocks to its optimizer.
        learning_rate: from microbatches done to the learning rate; None leaves the optimizer's own.
        rules: clipping, averages, loss scale of the updates.
        loss: mean loss of (output, targets).
        evaluation_loss: the same for evaluation; None for ``loss``.
        metrics: named sums over samples.
        seed: of the weights and of random numbers inside blocks.
        autocast: compute in this type (bf16, fp16) with float32 streams, or none.
        exact_streams: reversible blocks round what they add to a grid on which sums are exact, so that with unchanged weights
            their reconstruction is exact bit for bit (:mod:`petra.reversible.grid`).
        wire: streams and gradients travel between stages in this type (bf16), or None for their own; also inside a process, so
            that results don't depend on the number of processes.
        compile: backend of ``torch.compile`` for the functions inside blocks, or none.
        concurrency: stages of one process that run at the same time, each in a thread of its own with torch's number of threads.
        dp: replicas of every stage in processes of their own, each with an equal share of every microbatch (docs/data_parallel.md).
        transport: ``auto`` takes ``local`` in one process, ``lockstep`` where d = 2 at every boundary, ``edge`` elsewhere.

    Raises:
        ConfigError, ModelError: a set-up that can't work, before anything is built.
    """

    def __init__(
        self,
        model: Model,
        inputs: TensorSpec,
        *,
        method: str | Method = "petra",
        remedy: Remedy | None = None,
        k: int = 1,
        stages: int | Sequence[int] | None = None,
        optimizer: OptimizerFactory,
        learning_rate: Callable[[int], float] | None = None,
        rules: UpdateRules = UpdateRules(),  # noqa: B008 (frozen)
        loss: Loss | Losses = F.cross_entropy,
        metrics: Mapping[str, Metric] | None = None,
        seed: int = 0,
        numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
        runtime: Runtime = Runtime(),  # noqa: B008
        dp: int = 1,
    ) -> None:
        self.hooks = Hooks()
        self.numerics = numerics
        autocast, channels_last, wire = numerics.autocast, numerics.channels_last, numerics.wire
        exact_streams, compile, device = numerics.exact_streams, runtime.compile, runtime.device
        concurrency, transport = runtime.concurrency, runtime.transport
        losses = loss if isinstance(loss, Losses) else Losses(loss, loss)
        if not isinstance(k, int) or k < 1:
            raise ConfigError(f"k: found {k}, accepted are integers >= 1")
        if isinstance(method, str):
            if method not in METHODS:
                raise ConfigError(f"method: found {method!r}, accepted are {', '.join(METHODS)}")
            method = METHODS[method]
        self.remedy = Remedy() if remedy is None else remedy
        self.remedy.check(method)
        distributed = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self.layout = Layout.plan(model, inputs, stages, self.world, dp)
        if exact_streams:
            self.layout.require_exact()
        self.replica, place = self.layout.place(self.rank)
        own = self.layout.processes[place]
        self.model, self.method, self.k, self.device = model, method, k, torch.device(device)
        self.seed, self.autocast = seed, autocast
        self.metrics = {"accuracy": correct} if metrics is None else dict(metrics)
        self.clock = 0
        """Microbatches trained on since the start."""
        count = len(self.layout.stages)
        self.delays = method.delays(count, k)
        if isinstance(method.keep, tuple) and len(method.keep) != len(self.layout.profiles):
            raise ConfigError(
                f"method.keep: found {len(method.keep)}, accepted are one, or {len(self.layout.profiles)}, one per block"
            )
        self.boundary_delays = method.boundary_delays(count - 1)[: count - 1]
        method.check(self.delays, k, casts=autocast is not None)
        self._grid = Grid(self._stream_type(), self.device) if exact_streams else None
        self.wire = wire
        line = len(self.layout.processes)
        self.transport_name = choose_transport(transport, line, self.boundary_delays)
        self.concurrency, threads = concurrency, stage_threads(concurrency, self.world, self.device)
        self._learning_rate, self._optimizer, self.rules = learning_rate, optimizer, rules
        rules.require_moment(method, self.delays)
        self._source = Source(self.layout.inputs, self.device, channels_last, self._report)
        objective = Objective if dp == 1 else ShareObjective
        self.objective = objective(self.device, losses, self.metrics)
        self._totals = torch.zeros(2 + len(self.metrics), dtype=torch.float64, device=self.device)
        self._on_microbatch: Callable[[Tensor], None] | None = None
        self.measures: list[Callable[[], dict[str, float]]] = []
        """Each returns what it has measured of this process's stages since its last call, for :meth:`stage_metrics`."""

        self.keeps = keeps = [self._keeps(j) for j in range(count)]
        boundaries = [
            boundary(self.layout.profiles[blocks[-1]].outputs, keep[-1], len(self.metrics), channels_last=channels_last, wire=wire)
            for blocks, keep in zip(self.layout.stages[:-1], keeps[:-1], strict=True)
        ]
        if self.world > 1:
            agree(self._settings(inputs), boundaries, self.layout.processes, self.device)
        ahead = 2 * max(self.delays) + 2 * k + 2  # microbatches enough for a full line, an update and the drain
        flush_every = k if method.flush else None
        check(training_orders(self.delays, 0, ahead, flush_every), self.boundary_delays)
        self.stages = {
            j: Stage(
                [self._block(b, channels_last, compile) for b in self.layout.stages[j]],
                keeps[j],
                weights=self._weights(j),
                first_block=self.layout.stages[j].start,
                k=k,
                seed=replica_seed(seed, self.replica),
                autocast=autocast,
                returns_input=j > 0 and keeps[j - 1][-1] is Keep.NOTHING,
                channels_last=channels_last,
                concurrent=concurrency > 1,
                grid=Grid(self._grid.dtype, self.device) if self._grid is not None else None,
                index=j,
                hooks=self.hooks,
            )
            for j in own
        }
        self.replicas = None if dp == 1 else Replicas(self.layout, self.replica, self.device)
        self._line = None if self.replicas is None else self.replicas.pipeline_group
        self._transport = None
        if line > 1:
            self._transport = open_transport(
                self.transport_name, boundaries, self.boundary_delays, self.layout.processes, self.device, self._line
            )
        ports = connect(own, (self._source, self.objective), boundaries, self._transport)
        self.workers = {j: self._worker(j, *ports[j]) for j in own}
        if self.replicas is not None:
            self.replicas.join([*self.workers.values()], self.hooks)
        self.remedies = self._remedies()
        self._executor = Executor(
            self.workers,
            self._transport,
            self.delays,
            self.boundary_delays,
            flush_every,
            processes=self.world,
            paced=not all(self.layout.processes),
            threads=threads,
            flops=[sum(self.layout.profiles[b].flops for b in blocks) for blocks in self.layout.stages],
            on_completed=self._update_together if rules.clip_globally else None,
            hooks=self.hooks,
        )

    # -- running ---------------------------------------------------------------------------------------------------------------

    def train(
        self,
        stream: Stream,
        microbatches: int,
        on_microbatch: Callable[[Tensor], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Result:
        """Trains on the next ``microbatches`` of the stream, drains the pipeline and returns the means, the same in every process.

        Args:
            on_microbatch: called in the process of the first stage as each microbatch completes, with its report, a tensor on the
                device: targets that count, summed loss, summed metrics. Of replicas each gets its own share's, times their number.
            stop: asked now and then; soon after it says yes in some process, the pipeline is drained in all of them, and
                :attr:`clock` tells how many microbatches were done. Whether there is one must be the same in every process.

        Raises:
            ModelError: exact streams that left their range, in every process.
            NumericsError: a loss, a gradient or running statistics that aren't finite; see :class:`petra.UpdateRules`.
        """
        self._read(stream)
        self._on_microbatch = on_microbatch
        self._totals.zero_()
        start = self.clock
        for begin in self.hooks.train_begin:
            begin(start, start + microbatches)
        self.clock += self._executor.train(start, start + microbatches, stop)
        for end in self.hooks.train_end:
            end()
        if self.replicas is not None:
            self.replicas.synchronize()
        if self._grid is not None:
            self._require_range(self._grid)
        for worker in reversed(self.workers.values()):  # the stage behind knows better where it began
            worker.update.check_drained()
        result = self._result(self._totals)
        if self.rules.nonfinite == "stop" and self.rules.loss_scale is None and not math.isfinite(result.loss):
            raise NumericsError(
                f"stage {len(self.layout.stages)}: found a loss that isn't finite among microbatches "
                f"{start + 1} to {self.clock}; lower optim.lr or set optim.clip",
                origin=self.rank == 0,
            )
        return result

    def evaluate(self, stream: Stream, microbatches: int) -> Result:
        """Means over microbatches 0 … ``microbatches`` − 1 with running statistics and, where there are, averaged weights; targets
        of −100 don't count."""
        self._read(stream)
        self.objective.totals.zero_()
        for stage in self.stages.values():
            stage.module.eval()
        try:
            with self.averaged():
                self._executor.evaluate(microbatches)
        finally:
            for stage in self.stages.values():
                stage.module.train()
        return self._result(self.objective.totals)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights of this process are their moving averages, if the rules ask for averages."""
        with ExitStack() as stack:
            for worker in self.workers.values():
                stack.enter_context(worker.update.averaged())
            yield

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """This process's blocks by name, in the order of the model."""
        for j, stage in self.stages.items():
            yield from ((self.model.blocks[b].name, block) for b, block in zip(self.layout.stages[j], stage.module, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process's blocks, under the keys of :class:`petra.model.Chain`."""
        return {f"{name}.{key}": value for name, block in self.blocks() for key, value in block.state_dict().items()}

    def method_state(self) -> dict[str, dict[str, Tensor]]:
        """What the method and its remedy remember beside weights and optimizers, by kind and by the parameter's key."""
        found: dict[str, dict[str, Tensor]] = {}
        for j, stage in self.stages.items():
            remedy = self.remedies[j].state() if j in self.remedies else {}
            for kind, values in ({"previous": stage.previous()} | remedy).items():
                named = {name: values[p] for name, p in self._parameters(j).items() if p in values}
                found.setdefault(kind, {}).update(named)
        return found

    def load_method_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Goes on from a :meth:`method_state`, after weights, optimizers and the workers' clocks have been set."""
        for j, stage in self.stages.items():
            parameters = self._parameters(j)
            own: dict[str, dict[Tensor, Tensor]] = {
                kind: {p: values[name] for name, p in parameters.items() if name in values} for kind, values in state.items()
            }
            stage.resume(self.workers[j].t // self.k, own.pop("previous", {}))
            if j in self.remedies:
                self.remedies[j].resume(own)

    def _parameters(self, j: int) -> dict[str, nn.Parameter]:
        """The trained parameters of a stage under the keys of :meth:`state_dict`."""
        return {
            f"{self.model.blocks[b].name}.{name}": p
            for b, block in zip(self.layout.stages[j], self.stages[j].module, strict=True)
            for name, p in block.named_parameters()
            if p.requires_grad
        }

    def stage_metrics(self) -> dict[str, float]:
        """What every stage has measured since the last call, as ``stage/<j>/<name>`` with j from 1, in every process.

        Of replicas it is the first one's.
        """
        own = {f"stage/{j + 1}/{key}": v for j, worker in self.workers.items() for key, v in worker.update.metrics().items()}
        own |= {key: value for measure in self.measures for key, value in measure().items()}
        parts = [own] * self.world
        if self.world > 1:
            dist.all_gather_object(parts, own)
        return {key: value for part in parts[: len(self.layout.processes)] for key, value in part.items()}

    def _update_together(self, completed: int) -> None:
        """After an update's last microbatch: clips every stage's gradient by the norm of the whole network's, and updates."""
        if (completed + 1) % self.k:
            return
        updates = [worker.update for worker in self.workers.values()]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for update in updates:
            squares += update.squared_norm()
        if self.world > 1:
            dist.all_reduce(squares, group=self._line)
        for update in reversed(updates):
            update.apply(squares)

    def _report(self, report: Tensor) -> None:
        self._totals += report
        if self._on_microbatch is not None:
            self._on_microbatch(self.layout.dp * report if self.layout.dp > 1 else report)

    def _read(self, stream: Stream) -> None:
        """Microbatches, or this replica's share of them, come from here."""
        self._source.stream = self.objective.stream = stream if self.layout.dp == 1 else Share(stream, self.layout, self.replica)

    def _require_range(self, grid: Grid) -> None:
        """The range of all stages' streams in one grid, which refuses it alike in every process."""
        grid.largest = torch.stack([grid.largest, *(stage.grid.largest for stage in self.stages.values() if stage.grid)]).amax()
        if self.world > 1:
            dist.all_reduce(grid.largest, dist.ReduceOp.MAX)
        grid.require()

    def _result(self, totals: Tensor) -> Result:
        """The means of the totals of all processes, in every process; they are zeros where nothing is counted."""
        totals = totals.cpu()
        if self.world > 1:
            dist.all_reduce(totals)
        targets, *sums = totals.tolist()
        loss, *metrics = (s / max(targets, 1) for s in sums)
        return Result(int(targets), loss, dict(zip(self.metrics, metrics, strict=True)))

    # -- building --------------------------------------------------------------------------------------------------------------

    def _block(self, b: int, channels_last: bool, compile: str | None) -> nn.Module:
        """In its layout before the next is built, which then gets the memory that this one's first layout took."""
        block = self.model.build_block(b, self.seed).to(self.device).train()
        if channels_last:
            block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if compile is not None:
            compile_block(block, compile)
        return block

    def _keeps(self, j: int) -> tuple[Keep, ...]:
        blocks = [self.layout.profiles[b] for b in self.layout.stages[j]]
        last = j == len(self.layout.stages) - 1 and self.delays[j] == 0
        return self.method.keep_of([b.reversible for b in blocks], last=last, first_block=self.layout.stages[j].start)

    def _stream_type(self) -> torch.dtype:
        """Of the pairs that reversible blocks carry."""
        pairs = [profile.outputs for profile in self.layout.profiles if profile.reversible]
        return pairs[0][0].dtype if pairs else torch.float32

    def _weights(self, j: int) -> Weights:
        """Where a backward follows its forward at once, there is no older version to stash."""
        stashed = self.method.weights is Weights.STASHED
        return Weights.CURRENT if stashed and self.delays[j] == 0 else self.method.weights

    def _staleness(self, j: int) -> float:
        return self.method.staleness(self.delays[j], self.k)

    def _settings(self, inputs: TensorSpec) -> dict[str, object]:
        """What all processes must agree on; that neighbours have the same ``inputs`` their messages tell."""
        return {
            "dp": self.layout.dp,
            "k": self.k,
            "method": self.method,
            "remedy": self.remedy,
            "exact_streams": self._grid is not None,
            "transport": self.transport_name,
            "rules": self.rules,
            "seed": self.seed,
            "autocast": self.autocast,
            "stages": self.layout.stages,
            "processes": self.layout.processes,
            **({"inputs": str(inputs)} if self.layout.dp > 1 else {}),
        }

    def _worker(self, j: int, upstream: Port, downstream: Port) -> Worker:
        shrink = self.remedy.shrink if j > 0 and self.delays[j - 1] > self.delays[j] else 1.0
        return Worker(j, self.stages[j], upstream, downstream, self._update(j), self.hooks, shrink)

    def _update(self, j: int) -> Update:
        stage = self.stages[j]
        return Update(
            stage,
            self._optimizer(stage.module) if any(p.requires_grad for p in stage.module.parameters()) else None,
            self.remedy.learning_rate(self._learning_rate, self._staleness(j)),
            self.rules,
            device=self.device,
            number=j + 1,
            last=j == len(self.layout.stages) - 1,
            hooks=self.hooks,
        )

    def _remedies(self) -> dict[int, StageRemedy]:
        """What the remedy does at the updates of this process's stages."""
        made = {
            j: self.remedy.at(worker.stage, worker.update.optimizer, self._staleness(j))
            for j, worker in self.workers.items()
            if worker.update.optimizer is not None
        }
        return {j: remedy for j, remedy in made.items() if remedy is not None}
