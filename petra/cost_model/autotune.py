"""Chooses settings from the costs of blocks: the partition into stages, the boundary delays, and what each block stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from petra.cost_model.costs import PARAMETER_COPIES, BlockCost, StageCost, pipeline_costs, stage_cost
from petra.cost_model.links import INSTANT, Link
from petra.cost_model.simulator import predict
from petra.errors import ConfigError, invalid
from petra.method import Keep, Method, Weights
from petra.plan.partition import best_partition, partition_of
from petra.plan.schedule import in_flight
from petra.plan.transport import simulated_transport
from petra.settings import TransportName

TOLERANCE = 0.01
"""Relative loss of throughput that a smaller delay may cost; less than the variation from run to run."""


@dataclass(frozen=True)
class _KeepOption:
    """One choice of what the first blocks of a stage store.

    Attributes:
        seconds: Time of forward and backward of these blocks.
        stored: Bytes between forward and backward, all microbatches in flight.
        temporary: Bytes of the largest graph that exists only during a backward.
        keeps: The choice.
    """

    seconds: float
    stored: int
    temporary: int
    keeps: tuple[Keep, ...]


def choose_keeps(
    blocks: Sequence[BlockCost],
    smallest_keeps: Sequence[Keep],
    microbatches: int,
    limit: float,
    *,
    parameter_copies: int = PARAMETER_COPIES,
) -> tuple[Keep, ...]:
    """Choose which blocks of one stage store their graph, so that the stage is as fast as its memory allows.

    This is a knapsack problem, solved exactly.

    Args:
        smallest_keeps: What each block stores if not its graph.
        microbatches: Microbatches in flight.
        limit: Bytes available. If the stage exceeds them even without graphs, ``smallest_keeps`` is returned.
        parameter_copies: As for :func:`petra.cost_model.costs.stage_cost`.
    """
    options = [_KeepOption(0.0, 0, 0, ())]
    for block, smallest in zip(blocks, smallest_keeps, strict=True):
        extended = []
        for option in options:
            for keep in dict.fromkeys((smallest, Keep.GRAPH)):
                seconds = option.seconds + sum(block.seconds(keep))
                stored = option.stored + microbatches * block.stored_bytes(keep)
                temporary = option.temporary if keep is Keep.GRAPH else max(option.temporary, block.graph_bytes)
                extended.append(_KeepOption(seconds, stored, temporary, (*option.keeps, keep)))
        options = _pareto_front(extended)
    fixed = parameter_copies * sum(block.parameter_bytes for block in blocks)
    return next((o.keeps for o in options if fixed + o.stored + o.temporary <= limit), tuple(smallest_keeps))


def _pareto_front(options: list[_KeepOption]) -> list[_KeepOption]:
    """Return the options that no other option beats in time, stored and temporary bytes at once, fastest first."""
    front: list[_KeepOption] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.stored, o.temporary)):
        if not any(o.stored <= option.stored and o.temporary <= option.temporary for o in front):
            front.append(option)
    return front


def choose_delays(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    *,
    link: Link = INSTANT,
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    device_type: str = "cpu",
    max_delay: int = 4,
) -> tuple[int, ...]:
    """Choose the smallest boundary delays that keep the throughput of the largest ones, up to :data:`TOLERANCE`.

    The search starts from the smallest delay that suffices at all boundaries. It then lowers the delay of one boundary at a time,
    starting at the last, whose delay adds to the staleness of all stages before it. No delay of the result can be lowered alone.

    Args:
        costs: Cost of each stage.
        k: Microbatches per update.
        link, processes: As for :func:`petra.cost_model.simulator.predict`.
        transport: Transport that the run requests.
        device_type: ``cpu`` or ``cuda``, by which ``auto`` selects a transport.
        max_delay: Largest delay of a boundary.
    """
    if method.weights is Weights.DOUBLE and len(costs) > 1:
        # The delay of the first stage may not exceed k: two versions of the weights serve all microbatches in flight.
        max_delay = min(max_delay, k // (len(costs) - 1))
    delays = [max_delay] * (len(costs) - 1)

    def period() -> float:
        wires = simulated_transport(transport, delays, device_type)
        return predict(costs, replace(method, delay=tuple(delays)), k, link=link, processes=processes, transport=wires).period

    longest_period = (1 + TOLERANCE) * period() if delays else 0.0
    for uniform in range(max_delay):
        delays = [uniform] * len(delays)
        if period() <= longest_period:
            break
    else:
        delays = [max_delay] * len(delays)
    for boundary in reversed(range(len(delays))):
        while delays[boundary]:
            delays[boundary] -= 1
            if period() > longest_period:
                delays[boundary] += 1
                break
    return tuple(delays)


@dataclass(frozen=True)
class Tuned:
    """Chosen settings, in the form that :class:`petra.Pipeline` takes, and the costs that they lead to.

    Attributes:
        stages: Number of blocks in each stage.
        delay: One boundary delay, or one for each boundary.
        keep: What blocks store: one value, or one for each block.
        costs: Cost of each stage.
    """

    stages: tuple[int, ...]
    delay: int | tuple[int, ...]
    keep: Keep | tuple[Keep, ...]
    costs: tuple[StageCost, ...]

    @property
    def imbalance(self) -> float:
        """Time of forward and backward of the slowest stage, divided by the mean of all stages."""
        times = [cost.forward + cost.backward for cost in self.costs]
        return max(times) * len(times) / sum(times)


@dataclass(frozen=True)
class _Stages:
    """Candidate stages of a model: what their blocks store, what they cost, and whether they fit into memory."""

    blocks: Sequence[BlockCost]
    method: Method
    k: int
    count: int
    tune_keep: bool
    limit: float
    parameter_copies: int

    def keeps(self, blocks: range, stage: int, delay: int) -> tuple[Keep, ...]:
        """Return what each block of a stage stores, chosen by the method or by :func:`choose_keeps`."""
        costs, last = self.blocks[blocks.start : blocks.stop], stage == self.count - 1 and delay == 0
        keeps = self.method.keep_of([block.reversible for block in costs], last=last, first_block=blocks.start)
        if self.tune_keep:
            microbatches = in_flight(delay, self.k, self.method.flush)
            keeps = choose_keeps(costs, keeps, microbatches, self.limit, parameter_copies=self.parameter_copies)
        return keeps

    def seconds(self, blocks: range, stage: int, delay: int) -> float:
        """Return the time per microbatch of these blocks as a stage; infinity if they don't fit into memory."""
        keeps = self.keeps(blocks, stage, delay)
        costs = self.blocks[blocks.start : blocks.stop]
        cost = stage_cost(costs, keeps, previous_keep=None, parameter_copies=self.parameter_copies)
        return float("inf") if self.memory(cost, delay) > self.limit else cost.forward + cost.backward + cost.update / self.k

    def costs(self, partition: Sequence[range], keeps: Sequence[Sequence[Keep]]) -> list[StageCost]:
        """Return the cost of each stage."""
        stages = [self.blocks[blocks.start : blocks.stop] for blocks in partition]
        return pipeline_costs(stages, keeps, parameter_copies=self.parameter_copies)

    def memory(self, cost: StageCost, delay: int) -> int:
        """Return the bytes of a stage of delay τ."""
        return cost.memory(in_flight(delay, self.k, self.method.flush))


def tune(
    blocks: Sequence[BlockCost],
    method: Method,
    k: int,
    stages: int | Sequence[int],
    *,
    tune_delay: bool = False,
    tune_keep: bool = False,
    limit: float = float("inf"),
    link: Link = INSTANT,
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    device_type: str = "cpu",
    parameter_copies: int = PARAMETER_COPIES,
) -> Tuned:
    """Choose the partition, then the delays for it, then again what blocks store, with the memory that smaller delays free.

    Args:
        stages: Number of stages, to be partitioned so that the slowest is as fast as possible; or the number of blocks in each.
        tune_delay: Choose the boundary delays and ignore ``method.delay``. The partition is chosen for d = 2.
        tune_keep: Store the graph of each block for which there is memory, and as little as possible of the others. Ignores
            ``method.keep``.
        limit: Bytes available to each stage.
        link, processes: As for :func:`petra.cost_model.simulator.predict`.
        transport, device_type: As for :func:`choose_delays`.
        parameter_copies: As for :func:`petra.cost_model.costs.stage_cost`.

    Raises:
        ConfigError: If no partition keeps every stage within the limit.
    """
    count = stages if isinstance(stages, int) else len(stages)
    method = replace(method, delay=2 if tune_delay else method.delay, keep=Keep.NOTHING if tune_keep else method.keep)
    candidates = _Stages(blocks, method, k, count, tune_keep, limit, parameter_copies)
    delays, delay = method.delays(count, k), method.delay
    partition = _fastest_partition(candidates, delays) if isinstance(stages, int) else partition_of(stages)

    def choose(delays: Sequence[int]) -> tuple[list[tuple[Keep, ...]], list[StageCost]]:
        keeps = [candidates.keeps(stage, j, delays[j]) for j, stage in enumerate(partition)]
        return keeps, candidates.costs(partition, keeps)

    keeps, costs = choose(delays)
    if tune_delay:
        delay = choose_delays(costs, method, k, link=link, processes=processes, transport=transport, device_type=device_type)
        delays = replace(method, delay=delay).delays(count, k)
        keeps, costs = choose(delays)
    for j, cost in enumerate(costs):
        memory = candidates.memory(cost, delays[j])
        if memory > limit:
            expected = f"at least {memory / 1e9:.3g} GB for stage {j + 1} (or more stages)"
            raise invalid("trainer.memory_limit", expected, f"{limit / 1e9:g} GB")
    keep = tuple(keep for stage_keeps in keeps for keep in stage_keeps) if tune_keep else method.keep
    return Tuned(tuple(len(stage) for stage in partition), delay, keep, tuple(costs))


def _fastest_partition(candidates: _Stages, delays: Sequence[int]) -> list[range]:
    """Return the partition whose slowest stage is fastest."""

    def seconds(start: int, end: int, stage: int) -> float:
        return candidates.seconds(range(start, end), stage, delays[stage])

    try:
        return best_partition(len(candidates.blocks), candidates.count, seconds)
    except ConfigError as error:
        raise ConfigError(f"trainer.stages: {error}") from error
