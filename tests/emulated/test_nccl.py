"""Semantics of the emulated NCCL: order, rendezvous, streams, mismatches, timeouts, faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.emulated.core import core
from tests.emulated.device import Options
from tests.emulated.processes import Ended, run, start

SHORT = {"timeout": 60.0, "group_timeout": 2.0, "waits_for_all": True}
"""Time limits of runs that end in the watchdog's timeout."""


def gpu(rank: int, value: float = 0, size: int = 1000) -> Tensor:
    return torch.full((size,), float(value), device=f"cuda:{rank}")


def ring(rank: int) -> list[float]:
    world = dist.get_world_size()
    x, y = gpu(rank, rank, 100_000), gpu(rank, -1, 100_000)
    sends, receives = dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, y, (rank - 1) % world)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return [y.min().item(), y.max().item()]


@pytest.mark.parametrize("seed", core([0, 1, 2], {1}))
def test_grouped_operations_start_together(seed: int) -> None:
    assert run(ring, world=3, options=Options(seed=seed, delay_rate=0.5)) == [[2, 2], [0, 0], [1, 1]]


def collectives(rank: int) -> list[Any]:
    world = dist.get_world_size()
    x = gpu(rank, rank + 1, 4)
    total, largest, mean = x.clone(), x.clone(), x.clone()
    work = dist.all_reduce(total, async_op=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert work is not None
    work.wait()
    gathered = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(gathered, x)
    joint = torch.empty(4 * world, device=x.device)
    dist.all_gather_into_tensor(joint, x)
    part = torch.empty(4, device=x.device)
    dist.reduce_scatter_tensor(part, joint)
    first = x.clone()
    dist.broadcast(first, 0)
    dist.barrier()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, rank)
    return [t.cpu().tolist() for t in (total, largest, mean, joint, part, first, *gathered)] + objects


def test_collectives() -> None:
    for rank, found in enumerate(run(collectives, world=3, options=Options(seed=1, delay_rate=0.5))):
        joint = [float(r) for r in (1, 2, 3) for _ in range(4)]
        assert found[:6] == [[6.0] * 4, [3.0] * 4, [2.0] * 4, joint, [3.0 * (rank + 1)] * 4, [1.0] * 4]
        assert found[6:] == [[1.0] * 4, [2.0] * 4, [3.0] * 4, 0, 1, 2]


def receives(rank: int, waits: bool) -> Tensor:
    x = gpu(rank, 7 if rank == 0 else 0)
    if rank == 0:
        torch.cuda._sleep(20_000_000)
        dist.isend(x, 1).wait()  # type: ignore[union-attr]
        return x.cpu()
    work = dist.irecv(x, 0)
    assert work is not None
    if waits:
        work.wait()
    y = x + 1
    torch.cuda.synchronize()
    return y.cpu()


def test_a_receive_must_be_waited_for() -> None:
    assert (run(receives, True, world=2)[1] == 8).all()
    assert (run(receives, False, world=2)[1] != 8).all()


def reuses_send_buffer(rank: int, waits: bool) -> Tensor:
    x = gpu(rank, 3 if rank == 0 else 0)
    work = dist.isend(x, 1) if rank == 0 else None
    if rank == 0:
        if waits:
            assert work is not None
            work.wait()
        x.fill_(9)
        torch.cuda.synchronize()
        return x.cpu()
    torch.cuda._sleep(20_000_000)
    dist.irecv(x, 0).wait()  # type: ignore[union-attr]
    return x.cpu()


def test_a_sent_buffer_must_not_be_reused_before_the_send_is_done() -> None:
    assert (run(reuses_send_buffer, True, world=2)[1] == 3).all()
    assert (run(reuses_send_buffer, False, world=2)[1] == 9).all()


def both_send_first(rank: int, separate: bool) -> float:
    groups = [dist.new_group([0, 1]) for _ in range(2)] if separate else [dist.group.WORLD] * 2
    x, y = gpu(rank, rank), gpu(rank)
    sent = dist.isend(x, 1 - rank, group=groups[rank])
    received = dist.irecv(y, 1 - rank, group=groups[1 - rank])
    for work in (sent, received):
        assert work is not None
        work.wait()
    return y.mean().item()


def test_both_directions_share_a_communicator_unless_groups_are_separate() -> None:
    assert run(both_send_first, True, world=2) == [1, 0]
    ended = start(both_send_first, False, world=2, **SHORT)  # type: ignore[arg-type]
    assert_timeout(ended)
    assert "OpType=SEND, to rank 1: 1000 x Float" in ended.outputs[0]
    assert "OpType=RECV, from rank 1" in ended.outputs[0]


def assert_timeout(ended: Ended) -> None:
    """Check that each process was ended by the watchdog, which printed what was pending."""
    assert ended.statuses == [-6] * len(ended.statuses), ended
    assert all("Watchdog caught collective operation timeout" in text for text in ended.outputs)
    assert all("Pending operations" in text for text in ended.outputs)


def unanswered(rank: int) -> float:
    x = gpu(rank)
    if rank == 0:
        dist.isend(x, 1).wait()  # type: ignore[union-attr]
    else:
        torch.cuda._sleep(10_000_000_000)
    return x.cpu().mean().item()


def test_an_unanswered_operation_runs_into_the_timeout() -> None:
    ended = start(unanswered, world=2, **{**SHORT, "waits_for_all": False})  # type: ignore[arg-type]
    assert ended.statuses[0] == -6
    assert "Timeout(ms)=2000" in ended.outputs[0]


def other_order(rank: int) -> float:
    a, b = gpu(rank, 1), gpu(rank, 2, 500)
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor)
    return a.cpu().mean().item()


def collective_and_message(rank: int) -> float:
    a, b = gpu(rank, 1), gpu(rank, 2)
    if rank == 0:
        dist.all_reduce(a)
        dist.irecv(b, 1).wait()  # type: ignore[union-attr]
    else:
        dist.isend(b, 0).wait()  # type: ignore[union-attr]
        dist.all_reduce(a)
    return a.cpu().mean().item()


def other_size(rank: int) -> float:
    x = gpu(rank, 1, 1000 if rank == 0 else 999)
    (dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)).wait()  # type: ignore[union-attr]
    return x.cpu().mean().item()


def other_type(rank: int) -> float:
    x = gpu(rank, 1).to(torch.float32 if rank == 0 else torch.int32)
    dist.all_reduce(x)
    return x.cpu().sum().item()


@pytest.mark.parametrize(
    ("target", "expected"),
    core(
        [
            (other_order, "ALLREDUCE number 1 of 2000 bytes Float"),
            (collective_and_message, "SEND of 4000 bytes Float"),
            (other_size, "3996 bytes Float"),
            (other_type, "4000 bytes Int"),
        ],
        {0, 2},
    ),
)
def test_ranks_must_issue_matching_operations(target: Any, expected: str) -> None:
    ended = start(target, world=2, **SHORT)  # type: ignore[arg-type]
    assert 0 not in ended.statuses
    assert expected in "".join(ended.outputs)
    assert "emulated NCCL: rank" in "".join(ended.outputs)


def wrong_tensors(rank: int) -> list[str]:
    errors = []
    for tensor in (torch.ones(2), torch.ones(4, 4, device="cuda")[:, 1]):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            dist.irecv(tensor, 1 - rank, group=dist.group.WORLD) if tensor.is_cuda else dist.group.WORLD._get_backend(  # type: ignore[union-attr]
                torch.device("cuda")
            ).send([tensor], 1 - rank, 0)
        errors.append(str(caught.value))
    return errors


def test_tensors_must_be_on_the_device_and_contiguous() -> None:
    cpu, strided = run(wrong_tensors, world=2)[0]
    assert "CUDA and dense" in cpu
    assert "contiguous" in strided


def posts_ahead(rank: int) -> float:
    x, y = gpu(rank, rank), gpu(rank)
    work = dist.irecv(y, 1 - rank, group=dist.new_group([0, 1]))
    back = dist.new_group([0, 1])
    if rank == 0:
        z = (x + 1).tanh()  # the first launch of a kernel, while the receive occupies the device
        dist.isend(z, 1, group=back)
    assert work is not None
    return y.mean().item()


def test_with_lazy_loading_a_receive_that_waits_blocks_the_first_launch_of_a_kernel() -> None:
    ended = start(posts_ahead, world=2, options=Options(lazy_loading=True, patience_ms=1000), **SHORT)  # type: ignore[arg-type]
    assert 0 not in ended.statuses
    assert "loads its module, waits until the device is idle" in ended.outputs[0]


def loops(rank: int) -> float:
    x, y = gpu(rank, 1), gpu(rank)
    for _ in range(50):
        sends, receives = dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        x = y * 1.0
    return x.mean().item()


@pytest.mark.parametrize("fault", core(["die", "hang", "slow"], {0}))
def test_a_lost_rank_runs_the_others_into_the_timeout(fault: str) -> None:
    options = Options(fault=fault, fault_at=40, fault_rank=1, slow_us=500)
    group_timeout = 30 if fault == "slow" else 2
    ended = start(loops, world=2, options=options, group_timeout=group_timeout, waits_for_all=fault != "hang")
    if fault == "slow":
        assert ended.results == [1, 1]
        return
    assert ended.statuses == [-6, -9 if fault == "die" else None]
    assert "Watchdog caught collective operation timeout" in ended.outputs[0]


def submesh(rank: int) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "columns"))
    found = []
    for name in ("rows", "columns"):
        x = gpu(rank, rank, 2)
        dist.all_reduce(x, group=mesh.get_group(name))
        found.append(x[0].item())
    return found


def test_groups_of_a_mesh() -> None:
    assert run(submesh, world=4) == [[2, 1], [4, 1], [2, 5], [4, 5]]
