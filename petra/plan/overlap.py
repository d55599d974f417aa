"""Forward beside backward: the stages that can run the forward of one microbatch and the backward of another at the same time.

A stage runs the forward of one microbatch in some round and the backward of another in the next one, both with the same weights.
The backward needs a message that the next stage sent at least d rounds before, where d is the delay of the boundary between them.
With d >= 2, the message was sent before the round of the forward, so both can run in that round. The update follows both.
"""

from __future__ import annotations

from collections.abc import Sequence

from petra.errors import require


def overlapped_stages(boundary_delays: Sequence[int]) -> tuple[int, ...]:
    """Return the stages, from 0, that can run forward beside backward, given the delay d of each boundary."""
    return tuple(j for j, d in enumerate(boundary_delays) if d >= 2)


def require_overlap(boundary_delays: Sequence[int]) -> tuple[int, ...]:
    """Return :func:`overlapped_stages`.

    Raises:
        ConfigError: If there is none.
    """
    stages = overlapped_stages(boundary_delays)
    got = f"true with delays {list(boundary_delays)}" if boundary_delays else "true with one stage"
    require(bool(stages), "trainer.overlap", "false unless a boundary between stages has a delay d >= 2", got)
    return stages


def describe_overlap(boundary_delays: Sequence[int]) -> str:
    """Return which stages run forward beside backward, in one line; the last stage never does."""
    stages, count = overlapped_stages(boundary_delays), len(boundary_delays) + 1
    contiguous = stages == tuple(range(stages[0], stages[-1] + 1)) if stages else False
    numbers = f"{stages[0] + 1}–{stages[-1] + 1}" if contiguous and len(stages) > 1 else ", ".join(str(j + 1) for j in stages)
    return f"forward beside backward at stages {numbers} of {count}" if stages else f"no stage of {count} overlaps"
