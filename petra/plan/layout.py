"""The layout of a pipeline: contiguous blocks in each stage, and contiguous stages in each process of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from petra.errors import ModelError, invalid, is_integer, require
from petra.model import BlockProfile, Model
from petra.plan.partition import balanced_partition, partition_of
from petra.specs import TensorSpec


@dataclass(frozen=True)
class Layout:
    """Assigns blocks to stages, and stages to the processes of a pipeline and its replicas.

    Process p of replica i has rank i * len(processes) + p, so neighbouring stages have neighbouring ranks. With ``tp``, it is a
    group of processes, with ``tp`` ranks from ``tp`` times this number on.

    Attributes:
        profiles: Profile of each block.
        stages: Block indices of each stage, contiguous.
        processes: Stage indices of each process of a replica, contiguous. A process without a stage has an empty range.
        inputs: Spec of a replica's share of a microbatch.
        dp: Number of replicas.
        tp: Number of processes in a group, among which the linear layers of its stages are divided.
    """

    profiles: tuple[BlockProfile, ...]
    stages: tuple[range, ...]
    processes: tuple[range, ...]
    inputs: TensorSpec
    dp: int = 1
    tp: int = 1

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's replica, and the index of its process in that replica."""
        return divmod(rank // self.tp, len(self.processes))


def make_layout(
    model: Model, inputs: TensorSpec, stages: int | Sequence[int] | None, processes: int, dp: int = 1, tp: int = 1
) -> Layout:
    """Balance the FLOPs of stages over processes, and those of blocks over stages if there are fewer stages than blocks.

    Args:
        inputs: Spec of a whole microbatch, which replicas share.
        stages: Number of stages; None for one per block; or the number of blocks in each.
        processes: Number of processes, of all replicas together.

    Raises:
        ConfigError: If there are more stages than blocks, or if processes or samples cannot be shared evenly.
        ModelError: If blocks do not fit each other.
    """
    _check_stages(inputs, stages)
    n, processes = len(model.blocks), processes_per_replica(processes, dp, tp)
    if isinstance(stages, int):
        require(1 <= stages <= n, "stages", f"1 to {n}, since {model.name} has {n} blocks", stages)
    samples, *sample = inputs.shape
    require(samples % dp == 0, "dp", f"a divisor of {samples}, the number of samples of a microbatch", dp)
    share = replace(inputs, shape=(samples // dp, *sample))
    profiles = _profile(model, inputs, share)
    costs = [profile.flops for profile in profiles]
    if stages is None or isinstance(stages, int):
        blocks = balanced_partition(costs, stages or n)
    else:
        fits = sum(stages) == n and min(stages) >= 1
        require(fits, "stages", f"positive numbers of blocks that sum to {n}", list(stages))
        blocks = partition_of(stages)
    used = balanced_partition([sum(costs[b] for b in stage) for stage in blocks], min(processes, len(blocks)))
    return Layout(profiles, tuple(blocks), (*used, *[range(0)] * (processes - len(used))), share, dp, tp)


def _check_stages(inputs: TensorSpec, stages: object) -> None:
    counts = stages if isinstance(stages, list | tuple) else [] if stages is None else [stages]
    expected = "None, a number of stages, or the number of blocks in each"
    require(all(map(is_integer, counts)), "stages", expected, repr(stages))
    require(len(inputs.shape) >= 1, "inputs", "a shape with a dimension for the samples", inputs)


def processes_per_replica(processes: int, dp: int, tp: int = 1) -> int:
    """Return the number of processes of each replica, or of groups of ``tp`` processes.

    Raises:
        ConfigError: If processes cannot be shared evenly.
    """
    require(is_integer(dp) and dp >= 1, "dp", "an integer >= 1", dp)
    require(processes > 1 or dp == 1, "dp", "1 in one process, since replicas need processes of their own", dp)
    require(processes % dp == 0, "dp", f"a divisor of {processes}, the number of processes", dp)
    require(processes // dp % tp == 0, "tp", f"a divisor of {processes // dp}, the number of processes of a replica", tp)
    return processes // (dp * tp)


def _profile(model: Model, inputs: TensorSpec, share: TensorSpec) -> tuple[BlockProfile, ...]:
    try:
        return model.profile(share)
    except ModelError as error:
        model.profile(inputs)  # raises if the whole microbatch does not fit either, so that dp is not to blame
        got = f"{share} of {inputs} ({error})"
        raise invalid("dp", "shares of a microbatch that are large enough for the model", got) from error
