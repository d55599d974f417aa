"""The plan of a run: every fact that follows from model, method and placement, derived and checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from petra.errors import ModelError, alternatives, invalid, is_integer, require
from petra.method import METHODS, Keep, Method, Weights
from petra.model import BlockProfile, Model
from petra.plan.layout import Layout, make_layout
from petra.plan.messages import Boundary, boundary
from petra.plan.timetable import check_training, in_flight
from petra.plan.transport import choose_transport
from petra.settings import Numerics, TransportName
from petra.specs import TensorSpec


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        index: Index of the stage, from 0.
        blocks: Indices of its blocks in the model.
        profiles: Profile of each block.
        inputs: Specs of the input of its first block, for one microbatch; with replicas, for a replica's share of it.
        keeps: What each block stores between its forward and its backward pass. ``REFETCH`` only for the first block of the
            model.
        weights: Which weights its backward pass differentiates. ``CURRENT`` instead of ``STASHED`` if the delay is 0, because no
            update then separates the two passes.
        delay: Delay τ: number of other microbatches that it forwards between a microbatch's forward and backward pass.
        in_flight: Maximum number of microbatches between their forward and their backward pass.
        staleness: Mean number of updates between a microbatch's forward and backward pass in a full pipeline.
    """

    index: int
    blocks: range
    profiles: tuple[BlockProfile, ...]
    inputs: tuple[TensorSpec, ...]
    keeps: tuple[Keep, ...]
    weights: Weights
    delay: int
    in_flight: int
    staleness: float

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of the output of its last block."""
        return self.profiles[-1].outputs

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(profile.parameters for profile in self.profiles)

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass of one microbatch."""
        return sum(profile.flops for profile in self.profiles)


@dataclass(frozen=True)
class Plan:
    """What will happen in a run, as plain data. Made and checked by :func:`make_plan`.

    The engine, the dry run, resuming, auto-tuning, memory prediction and the reproductions read delays, stored activations and
    messages from here and do not derive them again.

    Attributes:
        inputs: Spec of a whole microbatch; ``layout.inputs`` is a replica's share.
        stages: All stages, in order.
        boundary_delays: d of each boundary between stages.
        boundaries: Messages of each boundary.
        transport: Transport of the run: the requested one, or the one that ``auto`` selected.
    """

    model: Model
    inputs: TensorSpec
    method: Method
    k: int
    layout: Layout
    numerics: Numerics
    stages: tuple[StagePlan, ...]
    boundary_delays: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    transport: TransportName

    def __str__(self) -> str:
        blocks = ", ".join(str(len(stage.blocks)) for stage in self.stages)
        method = f"method={self.method.name}, k={self.k}, dp={self.layout.dp}"
        return f"{self.model.name} with {self.parameters:,} parameters, {method}, stages=[{blocks}]"

    @cached_property
    def delays(self) -> tuple[int, ...]:
        """τ of each stage."""
        return tuple(stage.delay for stage in self.stages)

    @property
    def flush_every(self) -> int | None:
        """Number of microbatches after which the pipeline drains each time, or None if it drains only at the end."""
        return self.k if self.method.flush else None

    @property
    def refetches(self) -> bool:
        """Whether the first block fetches its input from the data source again."""
        return self.stages[0].keeps[0] is Keep.REFETCH

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(stage.parameters for stage in self.stages)

    def settings(self) -> dict[str, object]:
        """Return the settings that all ranks must agree on, by name."""
        # Ranks compare the messages of their boundaries, which differ if inputs do. No boundary connects two replicas.
        inputs = {"inputs": str(self.inputs)} if self.layout.dp > 1 else {}
        return {
            "dp": self.layout.dp,
            "tp": self.layout.tp,
            "k": self.k,
            "method": self.method,
            **vars(self.numerics),
            "transport": self.transport,
            "stages": self.layout.stages,
            "processes": self.layout.processes,
            **inputs,
        }


def make_plan(
    model: Model,
    inputs: TensorSpec,
    *,
    method: str | Method = "petra",
    k: int = 1,
    stages: int | Sequence[int] | None = None,
    processes: int = 1,
    dp: int = 1,
    tp: int = 1,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    transport: TransportName = "auto",
    device_type: str = "cpu",
    metrics: int = 1,
    refetch: bool = False,
) -> Plan:
    """Derive and check the plan of a run. Shapes are computed on the meta device, without building the model.

    Args:
        inputs: Spec of a whole microbatch, which is divided among the replicas.
        method: A name from :data:`petra.method.METHODS`, or a method.
        k: Microbatches per update.
        stages: Number of stages; None for one per block; or the number of blocks in each stage.
        processes, dp, tp: Number of processes, of all replicas together; of replicas; and of processes in each stage's group.
        transport, device_type: As for :func:`petra.plan.transport.choose_transport`.
        metrics: Number of entries of the metrics in the report that travels with the gradients.
        refetch: Whether the first block fetches its input from the data source again instead of storing it, if several microbatches
            are in flight.

    Raises:
        ConfigError: If settings are out of range or exclude each other.
        ModelError: If blocks do not fit each other.
        ScheduleError: If the schedule deadlocks.
    """
    _check_types(model, inputs, k)
    method, layout = _named_method(method), make_layout(model, inputs, stages, processes, dp, tp)
    delays = method.delays(count := len(layout.stages), k)
    if isinstance(method.keep, tuple):
        blocks, keeps = len(layout.profiles), len(method.keep)
        require(keeps == blocks, "method.keep", f"one value, or {blocks}, one per block", f"{keeps} values")
    boundary_delays = method.boundary_delays(count - 1)
    stage_plans = tuple(_stage_plan(layout, method, k, delays, j) for j in range(count))
    stage_plans = (_with_refetch(stage_plans[0]), *stage_plans[1:]) if refetch else stage_plans
    _check_numerics(layout, numerics, stage_plans)
    trained = [stage for stage in stage_plans if any(p.trained for p in layout.profiles[: stage.blocks.stop])]
    plan = Plan(
        model=model,
        inputs=inputs,
        method=method,
        k=k,
        layout=layout,
        numerics=numerics,
        stages=stage_plans,
        boundary_delays=boundary_delays,
        boundaries=tuple(boundary(s.outputs, s.keeps[-1], numerics, metrics, s in trained) for s in stage_plans[:-1]),
        transport=choose_transport(transport, len(layout.processes), boundary_delays, device_type, processes),
    )
    check_training(delays, boundary_delays)
    return plan


def _check_numerics(layout: Layout, numerics: Numerics, stages: Sequence[StagePlan]) -> None:
    for profile in layout.profiles if numerics.exact_streams else ():
        expected = f"false with block {profile.name}, which does not override enable_exact_streams"
        require(profile.exact or not profile.reversible, "exact_streams", expected, "true", ModelError)
    stores = numerics.stored_format is None or Keep.INPUT in [keep for stage in stages for keep in stage.keeps][1:]
    require(stores, "stored_format", "null, since no block after the first stores its input", numerics.stored_format)


def _check_types(model: object, inputs: object, k: object) -> None:
    require(isinstance(model, Model), "model", "a petra.Model (Model.of makes one from modules)", type(model).__name__)
    expected = "a petra.TensorSpec without a dimension of 0, such as TensorSpec((8, 3, 32, 32), torch.float32)"
    require(isinstance(inputs, TensorSpec) and 0 not in inputs.shape, "inputs", expected, inputs)
    require(is_integer(k) and k >= 1, "k", "an integer >= 1", repr(k))  # type: ignore[operator]


def _named_method(method: str | Method) -> Method:
    if type(method) is Method:  # a subclass has rules that the engine does not know
        return method
    if not isinstance(method, str) or method not in METHODS:
        raise invalid("method", alternatives(METHODS), method.name if isinstance(method, Method) else method)
    return METHODS[method]


def _stage_plan(layout: Layout, method: Method, k: int, delays: Sequence[int], j: int) -> StagePlan:
    blocks, delay = layout.stages[j], delays[j]
    profiles = tuple(layout.profiles[b] for b in blocks)
    last = j == len(delays) - 1 and delay == 0
    nothing_to_stash = method.weights is Weights.STASHED and delay == 0
    return StagePlan(
        index=j,
        blocks=blocks,
        profiles=profiles,
        inputs=(layout.inputs,) if j == 0 else layout.profiles[blocks.start - 1].outputs,
        keeps=keeps_of(method, [profile.reversible for profile in profiles], last=last, first_block=blocks.start),
        weights=Weights.CURRENT if nothing_to_stash else method.weights,
        delay=delay,
        in_flight=in_flight(delay, k, method.flush),
        staleness=method.staleness(delay, k),
    )


def keeps_of(method: Method, reversible: Sequence[bool], *, last: bool, first_block: int = 0) -> tuple[Keep, ...]:
    """Return what each block of a stage stores. Blocks that aren't reversible store their input instead of nothing.

    Args:
        method: The method.
        reversible: For each block of the stage, whether it is reversible.
        last: Whether the stage is the last one and runs the backward of a microbatch directly after its forward (τ = 0). Its
            blocks after the last reversible one then store their graph. The graph is freed as early as the graph of a
            recomputation would be, and saves a forward.
        first_block: Index of the stage's first block in the model.
    """
    wanted = (method.keep,) * len(reversible) if isinstance(method.keep, Keep) else method.keep[first_block:][: len(reversible)]
    keeps = [Keep.INPUT if keep is Keep.NOTHING and not r else keep for keep, r in zip(wanted, reversible, strict=True)]
    if last:
        tail = max((i + 1 for i, r in enumerate(reversible) if r), default=0)
        keeps[tail:] = [Keep.GRAPH] * (len(keeps) - tail)
    return tuple(keeps)


def _with_refetch(stage: StagePlan) -> StagePlan:
    """Return the plan of the first stage with a first block that fetches its input again, if it would store several inputs."""
    stores_inputs = stage.keeps[0] is Keep.INPUT and stage.in_flight > 1
    return replace(stage, keeps=(Keep.REFETCH, *stage.keeps[1:])) if stores_inputs else stage
