"""Choice of the transport: by the number of processes, the delays and the kind of device."""

from __future__ import annotations

import pytest
import torch

from petra import METHODS, TensorSpec
from petra.cost_model.costs import StageCost
from petra.cost_model.delays import choose_delays
from petra.cost_model.links import Link
from petra.plan import make_plan
from petra.plan.transport import choose_transport, simulated_transport
from tests.support.nets import mixed_net

IMAGES = TensorSpec((4, 3, 8, 8), torch.float64)


@pytest.mark.parametrize("delay", [0, 1, 2, 4])
def test_auto_never_selects_edge_on_gpus(delay: int) -> None:
    assert choose_transport("auto", 3, [delay] * 2, "cuda") == "lockstep"
    assert simulated_transport("auto", [delay] * 2, "cuda") == "lockstep"
    assert choose_transport("auto", 3, [delay] * 2, "cpu") == ("lockstep" if delay == 2 else "edge")


def test_a_named_transport_is_used_on_any_device() -> None:
    assert choose_transport("edge", 3, [2, 2], "cuda") == simulated_transport("edge", [2, 2], "cuda") == "edge"
    assert choose_transport("lockstep", 3, [1, 1], "cpu") == "lockstep"
    assert choose_transport("auto", 1, [1], "cuda") == "local"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_can_be_planned_for_gpus(method: str) -> None:
    plan = make_plan(mixed_net(), IMAGES, method=method, k=20, processes=3, device_type="cuda")
    assert plan.transport == "lockstep"


def test_delays_are_chosen_for_the_transport_of_the_device() -> None:
    """Lockstep needs d = 2 at one more boundary than edge to hide short messages."""
    costs = [StageCost(1.0, 3.0, forward_bytes=1, backward_bytes=2)] * 4
    chosen = {
        kind: choose_delays(costs, METHODS["petra"], 4, link=Link(bandwidth=64.0, latency=0.0), device_type=kind)
        for kind in ("cpu", "cuda")
    }
    assert chosen["cuda"] == choose_delays(costs, METHODS["petra"], 4, link=Link(bandwidth=64.0, latency=0.0), transport="lockstep")
    assert chosen["cuda"] != chosen["cpu"]
