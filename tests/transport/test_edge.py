"""Receives of the edge transport, whose buffers are on the meta device, with fake handles."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from petra.specs import TensorSpec
from petra.transport import Packing, edge


@pytest.mark.parametrize(("device", "delay", "ahead"), [("cpu", 0, 2), ("cpu", 1, 2), ("cpu", 3, 4), ("meta", 3, 0)])
def test_receives_are_posted_in_advance_on_cpus_only(monkeypatch: pytest.MonkeyPatch, device: str, delay: int, ahead: int) -> None:
    """As many as messages may wait at the boundary. A receive that waits occupies an accelerator."""
    posted: list[torch.Tensor] = []

    class Done:
        def wait(self) -> None:
            assert len(posted) - received <= ahead + 1

    def irecv(buffer: torch.Tensor, peer: int, group: object) -> Done:
        posted.append(buffer)
        return Done()

    monkeypatch.setattr(dist, "irecv", irecv)
    packing = Packing(((TensorSpec((2, 3), torch.float32),),), torch.device(device), "test")
    receiver = edge.EdgePort(packing, packing, None, None, 1, delay)  # type: ignore[arg-type]
    receiver.expect(5)
    for received in range(5):
        assert len(posted) == min(received + ahead, 5)
        receiver.receive(received)
    assert len(posted) == 5
