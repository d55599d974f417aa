"""Hooks: every event with its stage and microbatch, and no calls without hooks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from petra.hooks import Hook
from tests.support.nets import RandomSource, mixed
from tests.support.processes import run_processes

STAGES, K, MICROBATCHES = 6, 2, 5


class EventList(Hook):
    """Names and integer arguments of all events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []


def _append(name: str) -> Any:
    return lambda self, *arguments: self.events.append((name, tuple(a for a in arguments if isinstance(a, int))))


EVENTS = [name for name in vars(Hook) if not name.startswith("_")]
for _name in EVENTS:
    setattr(EventList, _name, _append(_name))


def observed(rank: int) -> list[tuple[str, tuple[int, ...]]]:
    pipeline = mixed(k=K, dp=2, stages=2)
    with pipeline.hooks.attached(EventList()) as hook:
        pipeline.train(RandomSource(), MICROBATCHES)
        pipeline.evaluate(RandomSource(), 2)
    return hook.events


def test_every_event_has_its_stage_and_microbatch() -> None:
    pipeline = mixed(k=K)
    with pipeline.hooks.attached(EventList()) as hook:
        pipeline.train(RandomSource(), MICROBATCHES)
    assert hook.events[0] == ("train_begin", (0, MICROBATCHES))
    assert hook.events[-1] == ("train_end", ())
    expected = Counter(
        {
            (name, arguments): 1
            for j in range(STAGES)
            for m in range(MICROBATCHES)
            for name, arguments in [
                *((f"{pass_}_{edge}", (j, m)) for pass_ in ("forward", "backward") for edge in ("begin", "end")),
                *(
                    (f"{way}_{edge}", (j, peer, m))
                    for way in ("receive", "send")
                    for edge in ("begin", "end")
                    for peer in (j - 1, j + 1)
                ),
                ("block_forward_begin", (j, j, m)),
                ("block_backward_end", (j, j, m)),
                *((f"update_{edge}", (j, m)) for edge in ("begin", "end") if (m + 1) % K == 0),
            ]
        }
    )
    assert Counter(hook.events[1:-1]) == expected


@pytest.mark.processes
def test_events_of_several_processes(tmp_path: Path) -> None:
    """Exchanges and all-reduces of two replicas with a lockstep pipeline of two processes each."""
    for rank, events in enumerate(run_processes(4, observed, tmp_path)):
        names, stage = Counter(name for name, _ in events), rank % 2
        assert {arguments[0] for name, arguments in events if name == "forward_begin"} == {stage}
        assert {arguments for name, arguments in events if name == "exchange_begin"} == {(stage,)}
        assert names["exchange_begin"] == names["exchange_end"] > 0
        assert [arguments for name, arguments in events if name == "all_reduce_end"] == [(stage, 1), (stage, 3)]
        assert names["all_reduce_begin"] == 2
