"""Semantics of the emulated device: streams, events, memory, synchronizations, errors, graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.emulated import device as emulated
from tests.emulated.core import core
from tests.emulated.device import Options
from tests.emulated.processes import run, start

LONG = 30_000_000
"""Nanoseconds for which a stream is kept busy."""


def on_side_stream(wait: bool, keep: str) -> Tensor:
    """Compute on a side stream, and read the result on the current stream."""
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
    return torch.stack([z, other]).cpu()


@pytest.mark.parametrize(
    ("wait", "keep", "expected"),
    core([(True, "hold", True), (True, "record", True), (False, "hold", False), (True, "free", False)], {1, 2}),
)
def test_values_are_wrong_without_a_wait_or_after_an_early_free(wait: bool, keep: str, expected: bool) -> None:
    z, other = run(on_side_stream, wait, keep)[0]
    assert torch.equal(other, torch.full((8,), 5.0))
    assert torch.equal(z, torch.full((8,), 7.0)) == expected


def fresh_memory() -> list[Tensor]:
    first = torch.empty(4, device="cuda")
    address = first.data_ptr()
    values = [first.cpu()]
    first.fill_(1)
    del first
    again = torch.empty(4, device="cuda")
    assert again.data_ptr() == address
    return [*values, again.cpu(), torch.empty(4, dtype=torch.int32, device="cuda").cpu()]


def test_fresh_and_freed_memory_is_poisoned() -> None:
    first, again, integers = run(fresh_memory)[0]
    assert first.isnan().all()
    assert again.isnan().all()
    assert (integers == -1).all()


def pinned_copies() -> list[Any]:
    source = torch.ones(4).pin_memory()
    torch.cuda._sleep(LONG)
    with emulated.watch_syncs() as syncs:
        x = source.to("cuda", non_blocking=True)
        target = torch.zeros(4).pin_memory()
        target.copy_(x, non_blocking=True)
    early = target.clone()
    source.fill_(7)  # too early: the copy hasn't run yet
    torch.cuda.synchronize()
    return [early, x.cpu(), target, source.is_pinned(), sum(syncs.values())]


def test_copies_of_pinned_memory_are_deferred() -> None:
    early, x, target, pinned, syncs = run(pinned_copies)[0]
    assert (early == 0).all()
    assert (x == 7).all()
    assert (target == 7).all()
    assert pinned
    assert syncs == 0


def freed_pinned_memory() -> Tensor:
    torch.cuda._sleep(LONG)
    x = torch.ones(128).pin_memory().to("cuda", non_blocking=True)  # the block is kept until its copy is done
    other = torch.zeros(128).pin_memory()
    assert (other == 0).all()
    return x.cpu()


def test_pinned_memory_is_not_reused_before_its_copies_are_done() -> None:
    assert (run(freed_pinned_memory)[0] == 1).all()


def waits() -> Counter[emulated.Sync]:
    x = torch.arange(4.0, device="cuda")
    with emulated.watch_syncs() as found:
        x.sum().item()
        x.cpu()
        x[x > 1]
        torch.ones(2).to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        (x * 2 + x.exp()).sum()
        torch.where(x > 1, x, 0.0)
    return found


def test_synchronizations_are_reported_with_their_place() -> None:
    found = run(waits)[0]
    assert {sync.kind for sync in found} == {"item", "copy", "sync", "synchronize"}
    assert all("test_device.py" in sync.place and "waits" in sync.place for sync in found)
    lines = {sync.place.split(":")[1] for sync in found}
    assert len(lines) == 5


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


def compare_layers() -> list[bool]:
    return [torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(layers("cuda"), layers("cpu"), strict=True)]


@pytest.mark.parametrize("seed", core([0, 1], {1}))
def test_layers_compute_what_they_compute_on_the_cpu(seed: int) -> None:
    assert all(run(compare_layers, options=Options(seed=seed, delay_rate=0.5))[0])


def replays() -> list[Tensor]:
    x, weight = torch.zeros(4, device="cuda"), torch.full((4,), 3.0, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        doubled = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            squared = x * x
        torch.cuda.current_stream().wait_stream(side)
        y = doubled * weight + squared
    found = [y.clone()]
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        found.append(y.clone())
    return [t.cpu() for t in found]


@pytest.mark.stress
def test_graphs_replay_what_was_captured() -> None:
    before, first, second = run(replays)[0]
    assert before.isnan().all()  # a capture runs nothing
    assert (first == 7).all()
    assert (second == 16).all()


def synchronizes_in_a_capture() -> str:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    return str(caught.value)


@pytest.mark.stress
def test_a_capture_forbids_synchronizations() -> None:
    assert "capturing" in run(synchronizes_in_a_capture)[0]


def peak() -> list[int]:
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    x = torch.empty(1024, device="cuda")
    y = torch.empty(4096, device="cuda")
    del x, y
    return [torch.cuda.memory_allocated() - start, torch.cuda.max_memory_allocated() - start]


def test_memory_is_counted() -> None:
    assert run(peak)[0] == [0, 4 * (1024 + 4096)]


def many_launches() -> float:
    x = torch.ones(4, device="cuda")
    for _ in range(100):
        x = x + 1
    return float(x.sum())


@pytest.mark.parametrize(("fault", "status"), core([("die", -9), ("hang", None), ("slow", 0)], {0}))
def test_faults_strike_at_their_launch(fault: str, status: int | None) -> None:
    options = Options(fault=fault, fault_at=50, slow_us=100)
    ended = start(many_launches, options=options, timeout=2 if fault == "hang" else 20)
    assert ended.statuses == [status], ended.outputs


def test_the_device_comes_before_torch() -> None:
    with pytest.raises(RuntimeError, match="before torch is imported"):
        emulated.install(Options())
