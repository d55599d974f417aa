"""Semantics of the emulated device: streams, events, memory, synchronizations, errors. The checks run in other processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.emulated import device as emulated
from tests.emulated.device import Options
from tests.emulated.processes import core, run, start

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


def fresh_and_freed_memory_is_poisoned() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = torch.empty(1024, device="cuda")
    address = first.data_ptr()
    assert first.cpu().isnan().all()
    first.fill_(1)
    del first
    again = torch.empty(1024, device="cuda")
    assert again.data_ptr() == address
    assert again.cpu().isnan().all()
    integers = torch.empty(4096, dtype=torch.int32, device="cuda")
    assert (integers.cpu() == -1).all()
    del again, integers
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4 * (1024 + 4096)


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


def synchronizations_are_reported_with_their_place() -> None:
    x = torch.arange(4.0, device="cuda")
    with emulated.watch_syncs() as found:
        x.sum().item()
        x.cpu()
        x[x > 1]
        torch.ones(2).to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        (x * 2 + x.exp()).sum()
        torch.where(x > 1, x, 0.0)
    assert {sync.kind for sync in found} == {"item", "copy", "sync", "synchronize"}
    assert all("test_device.py" in sync.place and "reported_with_their_place" in sync.place for sync in found)
    assert len({sync.place.split(":")[1] for sync in found}) == 5


def layers(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    convolution = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.Dropout(0.3)]
    net = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(128, 5)).to(device)
    x = torch.randn(4, 3, 16, 16).to(device).to(memory_format=torch.channels_last).requires_grad_()
    torch.manual_seed(1)
    loss = nn.functional.cross_entropy(net(x), torch.arange(4, device=device))
    loss.backward()
    found = [loss, x.grad, *(p.grad for p in net.parameters()), *net.buffers()]
    return [t.detach().cpu() for t in found if t is not None]


def layers_compute_what_they_compute_on_the_cpu() -> None:
    for a, b in zip(layers("cuda"), layers("cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


CHECKS = [
    *(side_stream, fresh_and_freed_memory_is_poisoned, copies_of_pinned_memory_are_deferred),
    *(synchronizations_are_reported_with_their_place, layers_compute_what_they_compute_on_the_cpu),
]


@pytest.mark.parametrize("check", CHECKS)
def test_semantics(check: Callable[[], None]) -> None:
    delayed = check is layers_compute_what_they_compute_on_the_cpu
    run(check, options=Options(seed=delayed, delay_rate=0.5))


def many_launches() -> float:
    x = torch.ones(4, device="cuda")
    for _ in range(100):
        x = x + 1
    return float(x.sum())


@pytest.mark.parametrize(("fault", "status"), core([("die", -9), ("hang", None)], {0}))
def test_faults_strike_at_their_launch(fault: str, status: int | None) -> None:
    ended = start(many_launches, options=Options(fault=fault, fault_at=50), timeout=2 if fault == "hang" else 20)
    assert ended.statuses == [status], ended.outputs


def test_the_device_comes_before_torch() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        emulated.install(Options())
