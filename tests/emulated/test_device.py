"""Semantics of the emulated device that test_mutants.py does not show. The checks run in other processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.emulated import device as emulated
from tests.emulated.device import Options
from tests.emulated.processes import run

LONG = 30_000_000
"""Nanoseconds for which a stream is kept busy."""


def side_stream() -> None:
    """Values are wrong without a wait, or after an early free."""
    for wait, keep in ((True, "hold"), (True, "record"), (False, "hold"), (True, "free")):
        side = torch.cuda.Stream()
        x = torch.full((8,), 2.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            y = x * 3
            event = side.record_event()
        if keep == "record":
            x.record_stream(side)
        if keep != "hold":
            del x
        other = torch.full((8,), 5.0, device="cuda")  # reuses the memory of x, unless something keeps it
        if wait:
            torch.cuda.current_stream().wait_event(event)
        z = y + 1
        assert torch.equal(other.cpu(), torch.full((8,), 5.0))
        assert torch.equal(z.cpu(), torch.full((8,), 7.0)) == (wait and keep != "free"), (wait, keep)


def copies_of_pinned_memory_are_deferred() -> None:
    source = torch.ones(4).pin_memory()
    torch.cuda._sleep(LONG)
    with emulated.watch_syncs() as syncs:
        x = source.to("cuda", non_blocking=True)
        target = torch.zeros(4).pin_memory()
        target.copy_(x, non_blocking=True)
    assert (target == 0).all()
    source.fill_(7)  # too early: the copy hasn't run yet
    kept = torch.ones(128).pin_memory().to("cuda", non_blocking=True)  # the pinned block is kept until its copy is done
    assert (torch.zeros(128).pin_memory() == 0).all()
    torch.cuda.synchronize()
    assert (x.cpu() == 7).all()
    assert (target == 7).all()
    assert (kept.cpu() == 1).all()
    assert source.is_pinned()
    assert not syncs


@pytest.mark.parametrize("check", [side_stream, copies_of_pinned_memory_are_deferred])
def test_semantics(check: Callable[[], None]) -> None:
    run(check)


def test_the_device_comes_before_torch() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        emulated.install(Options())
