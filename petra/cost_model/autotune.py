"""Settings chosen from what blocks cost: where to cut, how far each stage runs ahead, and which blocks keep their graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from petra.cost_model.costs import BlockCost
from petra.cost_model.simulator import Link, StageCost, predict
from petra.errors import ConfigError
from petra.method import Keep, Method, Weights
from petra.plan.layout import best_cut
from petra.plan.schedule import in_flight
from petra.plan.transport import simulated_transport
from petra.settings import TransportName

COPIES = 3
"""Of the parameters: weights, gradients, and one state of the optimizer (momentum)."""
TOLERANCE = 0.01
"""A delay may cost this part of the throughput, which is less than one sees from run to run."""


def stage_cost(
    blocks: Sequence[BlockCost], keeps: Sequence[Keep], *, before: Keep | None, optimizer_copies: int = COPIES
) -> StageCost:
    """The cost of consecutive blocks as one stage.

    The message back holds δ, and x̃ if the stage before has nothing else to get its output from. The fixed bytes hold the
    largest graph that a backward makes, on top of the copies of the parameters; messages under way, of which each boundary has
    d + 1 at most in each direction, are not counted.

    Args:
        before: what the last block of the stage before keeps; None for the first stage, which sends nothing back.
    """
    times = [block.seconds(keep) for block, keep in zip(blocks, keeps, strict=True)]
    made = [block.graph_bytes for block, keep in zip(blocks, keeps, strict=True) if keep is not Keep.GRAPH]
    first, last = blocks[0], blocks[-1]
    return StageCost(
        forward=sum(f for f, _ in times),
        backward=sum(b for _, b in times),
        update=sum(block.update for block in blocks),
        forward_bytes=last.output_bytes,
        backward_bytes=0 if before is None else first.input_bytes * (2 if before is Keep.NOTHING else 1),
        held_bytes=sum(block.held_bytes(keep) for block, keep in zip(blocks, keeps, strict=True)),
        fixed_bytes=optimizer_copies * sum(block.parameter_bytes for block in blocks) + max(made, default=0),
    )


def line_costs(
    stages: Sequence[Sequence[BlockCost]], keeps: Sequence[Sequence[Keep]], *, optimizer_copies: int = COPIES
) -> list[StageCost]:
    """The costs of all stages of a line, from their blocks and what those keep."""
    before = [None, *(kept[-1] for kept in keeps[:-1])]
    return [
        stage_cost(blocks, kept, before=last, optimizer_copies=optimizer_copies)
        for blocks, kept, last in zip(stages, keeps, before, strict=True)
    ]


def memory_of(cost: StageCost, delay: int, k: int, flush: bool) -> int:
    """Bytes of a stage of delay τ."""
    return cost.fixed_bytes + in_flight(delay, k, flush) * cost.held_bytes


def choose_keeps(
    blocks: Sequence[BlockCost], lean: Sequence[Keep], copies: int, limit: float, *, optimizer_copies: int = COPIES
) -> tuple[Keep, ...]:
    """Which blocks of one stage keep their graph so that it is fastest within its memory: a knapsack, solved exactly.

    Args:
        lean: what each block keeps if not its graph.
        copies: microbatches in flight.
        limit: bytes; if even the lean stage is larger, that is returned.
    """
    fronts: list[tuple[float, int, int, tuple[Keep, ...]]] = [(0.0, 0, 0, ())]  # seconds, bytes held, largest graph made
    for block, keep in zip(blocks, lean, strict=True):
        grown = []
        for seconds, held, largest, chosen in fronts:
            for option in dict.fromkeys((keep, Keep.GRAPH)):
                made = largest if option is Keep.GRAPH else max(largest, block.graph_bytes)
                total = held + copies * block.held_bytes(option)
                grown.append((seconds + sum(block.seconds(option)), total, made, (*chosen, option)))
        fronts = _undominated(grown)
    fixed = optimizer_copies * sum(block.parameter_bytes for block in blocks)
    return next((chosen for _, held, made, chosen in fronts if fixed + held + made <= limit), tuple(lean))


def _undominated(options: list[tuple[float, int, int, tuple[Keep, ...]]]) -> list[tuple[float, int, int, tuple[Keep, ...]]]:
    """Those that no other beats in seconds, bytes held and largest graph at once; the fastest first."""
    kept: list[tuple[float, int, int, tuple[Keep, ...]]] = []
    for option in sorted(options, key=lambda o: o[:3]):
        if not any(o[1] <= option[1] and o[2] <= option[2] for o in kept):
            kept.append(option)
    return kept


def choose_delays(
    costs: Sequence[StageCost],
    method: Method,
    k: int,
    *,
    link: Link = Link(),  # noqa: B008
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    most: int = 4,
) -> tuple[int, ...]:
    """The smallest delay of each boundary with which no other throughput than the best is lost (up to TOLERANCE).

    The best is that of ``most`` at every boundary. Boundaries are lowered one by one from the last, where a delay makes all
    stages before it stale, as long as the simulator finds the period unchanged; none of those returned can be lowered alone.
    """
    if method.weights is Weights.DOUBLE and len(costs) > 1:
        most = min(most, k // (len(costs) - 1))  # two versions must do for all microbatches in flight
    delays = [most] * (len(costs) - 1)

    def period() -> float:
        wires = simulated_transport(transport, delays)
        return predict(costs, replace(method, delay=tuple(delays)), k, link=link, processes=processes, transport=wires).period

    bound = (1 + TOLERANCE) * period() if delays else 0.0
    for uniform in range(most):
        delays = [uniform] * len(delays)
        if period() <= bound:
            break
    else:
        delays = [most] * len(delays)
    for boundary in reversed(range(len(delays))):
        while delays[boundary]:
            delays[boundary] -= 1
            if period() > bound:
                delays[boundary] += 1
                break
    return tuple(delays)


@dataclass(frozen=True)
class Tuned:
    """A cut with its delays and keeps, as :class:`petra.Pipeline` takes them."""

    stages: tuple[int, ...]
    """Blocks in each."""
    delay: int | tuple[int, ...]
    keep: Keep | tuple[Keep, ...]
    """One, or one for each block."""
    costs: tuple[StageCost, ...]

    @property
    def imbalance(self) -> float:
        """The slowest stage's F + B over the mean."""
        times = [cost.forward + cost.backward for cost in self.costs]
        return max(times) * len(times) / sum(times)


def tune(
    blocks: Sequence[BlockCost],
    method: Method,
    k: int,
    stages: int | Sequence[int],
    *,
    tune_delay: bool = False,
    tune_keep: bool = False,
    limit: float = float("inf"),
    link: Link = Link(),  # noqa: B008
    processes: Sequence[range] | None = None,
    transport: TransportName = "auto",
    optimizer_copies: int = COPIES,
) -> Tuned:
    """Chooses the cut, then the delays for it, then the keeps again with the memory that smaller delays leave.

    Args:
        stages: how many, to be cut such that the slowest is as fast as can be; or the number of blocks in each.
        tune_delay: replaces ``method.delay``; until then stages are judged by PETRA's d = 2.
        tune_keep: each block keeps its graph where there is memory for it, and else what it can least.
        limit: bytes that one stage may take.
        processes: for each its stages; None for one stage each.
        transport: that the run asks for.
        optimizer_copies: of the parameters in a stage: weights, gradients, the optimizer's states, a moving average.

    Raises:
        ConfigError: no cut keeps every stage within the limit.
    """
    count = stages if isinstance(stages, int) else len(stages)
    method = replace(method, delay=2 if tune_delay else method.delay, keep=Keep.NOTHING if tune_keep else method.keep)
    delays = method.delays(count, k)

    def keeps_of(start: int, end: int, stage: int, delay: int) -> tuple[Keep, ...]:
        part = blocks[start:end]
        kept = method.keep_of([b.reversible for b in part], last=stage == count - 1 and delay == 0, first_block=start)
        if tune_keep:
            kept = choose_keeps(part, kept, in_flight(delay, k, method.flush), limit, optimizer_copies=optimizer_copies)
        return kept

    def seconds(start: int, end: int, stage: int) -> float:
        kept = keeps_of(start, end, stage, delays[stage])
        cost = stage_cost(blocks[start:end], kept, before=None, optimizer_copies=optimizer_copies)
        if memory_of(cost, delays[stage], k, method.flush) > limit:
            return float("inf")
        return cost.forward + cost.backward + cost.update / k

    if isinstance(stages, int):
        try:
            cut = best_cut(len(blocks), stages, seconds)
        except ConfigError as error:
            raise ConfigError(f"trainer.stages: {error}") from error
    else:
        ends = [sum(stages[:j]) for j in range(count + 1)]
        cut = [range(a, b) for a, b in pairwise(ends)]
    parts = [blocks[r.start : r.stop] for r in cut]

    def keeps_with(delays: Sequence[int]) -> list[tuple[Keep, ...]]:
        return [keeps_of(r.start, r.stop, j, delays[j]) for j, r in enumerate(cut)]

    delay = method.delay
    if tune_delay:
        judged = line_costs(parts, keeps_with(delays), optimizer_copies=optimizer_copies)
        delay = choose_delays(judged, method, k, link=link, processes=processes, transport=transport)
        delays = replace(method, delay=delay).delays(count, k)
    keeps = keeps_with(delays)
    costs = tuple(line_costs(parts, keeps, optimizer_copies=optimizer_copies))
    over = [j + 1 for j, cost in enumerate(costs) if memory_of(cost, delays[j], k, method.flush) > limit]
    if over:
        raise ConfigError(
            f"trainer.memory_limit: found {limit / 1e9:g} GB, less than stage {over[0]} needs, "
            f"{memory_of(costs[over[0] - 1], delays[over[0] - 1], k, method.flush) / 1e9:.3g} GB; accepted is more, or more stages"
        )
    return Tuned(tuple(len(r) for r in cut), delay, tuple(k for part in keeps for k in part) if tune_keep else method.keep, costs)
