"""Findings of an audit of the GPU paths that no test of a whole run shows."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from petra.inplace_abn import InPlaceABN
from tests.emulated import device as emulated
from tests.emulated.core import core
from tests.emulated.processes import run
from tests.emulated.runs import Case

pytestmark = pytest.mark.emulated

WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


def joint_statistics(rank: int) -> dict[str, int]:
    """Run a layer with statistics of all processes, and return the places where the host waited."""
    device = torch.device("cuda", rank)
    layer = InPlaceABN(4, group=dist.group.WORLD, synchronized=True).to(device)
    x = torch.ones(3, 4, 5, 5, device=device)
    with emulated.watch_syncs() as found:
        for _ in range(2):
            layer(x.clone().requires_grad_() * 1.5).sum().backward()
    return {str(place): count for place, count in found.items()}


def test_joint_statistics_do_not_make_the_host_wait() -> None:
    assert run(joint_statistics, world=2) == [{}, {}]


def open_edges(rank: int, chosen: str | None) -> str | None:
    """Open the transport edge, and return the variable that it sets."""
    os.environ.pop(WARNING, None)
    if chosen is not None:
        os.environ[WARNING] = chosen
    Case(transport="edge").pipeline(torch.device("cuda", rank))
    return os.environ.get(WARNING)


@pytest.mark.parametrize("chosen", core([None, "true"], {0}))
def test_edge_turns_off_the_warning_of_each_communicator_unless_the_user_turned_it_on(chosen: str | None) -> None:
    assert run(open_edges, chosen, world=2) == [chosen or "false"] * 2
