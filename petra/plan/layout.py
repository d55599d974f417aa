"""Where everything stands: contiguous blocks in each stage, contiguous stages in each process of a line, line after line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from petra.errors import ConfigError, ModelError
from petra.model import BlockProfile, Model
from petra.plan.partition import balanced_partition
from petra.specs import TensorSpec


@dataclass(frozen=True)
class Layout:
    """The cut of one model for one set of processes: one line of them, or ``dp`` lines that are replicas of each other.

    Process r of the line that replica i is has rank i · len(processes) + r: neighbouring stages have neighbouring ranks.
    """

    profiles: tuple[BlockProfile, ...]
    stages: tuple[range, ...]
    """For each stage its blocks."""
    processes: tuple[range, ...]
    """For each process of a line its stages; empty for those beyond the number of stages."""
    inputs: TensorSpec
    """A replica's share of a microbatch."""
    dp: int = 1
    """Replicas."""

    def place(self, rank: int) -> tuple[int, int]:
        """The replica that a process belongs to, and its place in that line."""
        return divmod(rank, len(self.processes))

    def require_exact(self) -> None:
        """Raises :class:`petra.errors.ModelError` for a reversible block that can't keep its streams on a grid."""
        for profile in self.profiles:
            if profile.reversible and not profile.exact:
                raise ModelError(
                    f"exact_streams: found block {profile.name}, a reversible one without a carry_on of its own, accepted is false"
                )

    @staticmethod
    def plan(model: Model, inputs: TensorSpec, stages: int | Sequence[int] | None, processes: int, dp: int = 1) -> Layout:
        """Balances the FLOPs of stages over processes, and those of blocks over stages if there are fewer stages than blocks.

        Args:
            inputs: form of a whole microbatch, which replicas share out.
            stages: how many; None for one for each block; or the number of blocks in each.
            processes: of all replicas.

        Raises:
            ConfigError: more processes or stages than blocks; replicas that processes or samples can't be shared out to.
            ModelError: blocks that don't fit each other.
        """
        n, processes = len(model.blocks), line_length(processes, dp)
        if processes > n:
            raise ConfigError(f"processes: found {processes}, accepted are 1 to {n}, since {model.name} has {n} blocks")
        if isinstance(stages, int) and not 1 <= stages <= n:
            raise ConfigError(f"stages: found {stages}, accepted are 1 to {n}, since {model.name} has {n} blocks")
        share = share_of(inputs, dp)
        profiles = _profile(model, inputs, share)
        costs = [profile.flops for profile in profiles]
        if stages is None or isinstance(stages, int):
            blocks = balanced_partition(costs, stages or n)
        else:
            if sum(stages) != n or min(stages) < 1:
                raise ConfigError(f"stages: found {list(stages)}, accepted are positive numbers of blocks that sum to {n}")
            blocks = [range(sum(stages[:j]), sum(stages[: j + 1])) for j in range(len(stages))]
        stage_costs = [sum(costs[b] for b in stage) for stage in blocks]
        used = balanced_partition(stage_costs, min(processes, len(blocks)))
        return Layout(profiles, tuple(blocks), (*used, *[range(0)] * (processes - len(used))), share, dp)


def line_length(processes: int, dp: int) -> int:
    """Processes of each replica.

    Raises:
        ConfigError: they can't be shared out evenly.
    """
    if not isinstance(dp, int) or dp < 1:
        raise ConfigError(f"dp: found {dp}, accepted are integers >= 1")
    if processes == 1 < dp:
        raise ConfigError(f"dp: found {dp} in one process, accepted is 1, since replicas need processes of their own")
    if processes % dp:
        raise ConfigError(f"dp: found {dp}, accepted are divisors of {processes}, the number of processes")
    return processes // dp


def share_of(inputs: TensorSpec, dp: int) -> TensorSpec:
    """The form of each replica's share of a microbatch.

    Raises:
        ConfigError: its samples can't be shared out evenly.
    """
    samples, *sample = inputs.shape
    if samples % dp:
        raise ConfigError(f"dp: found {dp}, accepted are divisors of {samples}, the samples of a microbatch")
    return replace(inputs, shape=(samples // dp, *sample))


def _profile(model: Model, inputs: TensorSpec, share: TensorSpec) -> tuple[BlockProfile, ...]:
    try:
        return model.profile(share)
    except ModelError as error:
        model.profile(inputs)  # raises what is wrong without replicas too
        raise ConfigError(f"dp: a replica's share {share} of a microbatch {inputs} is too small ({error})") from error
