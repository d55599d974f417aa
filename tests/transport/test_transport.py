"""Messages between stages: packing, smaller types, memory, and receives of the edge transport, with fake handles."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petra import Keep, ModelError, Numerics
from petra.cost_model.costs import count_blocks, pipeline_costs
from petra.errors import CommunicationError
from petra.message_formats import MESSAGE_FORMATS, Form, MessageFormat, Shape
from petra.plan.messages import Boundary, boundary
from petra.plan.timetable import Op, Step
from petra.specs import TensorSpec
from petra.transport import Packing, connect, edge, local_boundary
from petra.transport.lockstep import LockstepTransport
from tests.support.nets import RandomSource, assert_equal, mixed_net

CPU = torch.device("cpu")


@pytest.mark.parametrize("channels_last", [False, True])
def test_messages_survive_packing(channels_last: bool) -> None:
    image = TensorSpec((2, 3, 5, 4), torch.float32, channels_last)
    spec = ((image, image), (), (TensorSpec((3,), torch.float64), TensorSpec((2, 3, 2), torch.bfloat16)))
    images = torch.randn(2, 2, 3, 5, 4)
    message = ((images[0], images[1]), (), (torch.randn(3).double(), torch.randn(2, 3, 2).bfloat16()))
    packing = Packing(spec, CPU, "test")
    buffer = packing.pack(message)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == packing.buffer().shape
    received = packing.unpack(buffer)
    assert_equal(received, message)
    assert all(t.data_ptr() % 64 == buffer.data_ptr() % 64 for part in received for t in part)
    expected = torch.channels_last if channels_last else torch.contiguous_format
    assert received[0][1].is_contiguous(memory_format=expected)


def test_a_buffer_carries_another_message_once_it_is_released() -> None:
    packing = Packing(((TensorSpec((2, 3), torch.float32),),), CPU, "test")
    first, second = packing.pack(((torch.zeros(2, 3),),)), packing.pack(((torch.ones(2, 3),),))
    assert first.data_ptr() != second.data_ptr()
    packing.release(first)
    third = packing.pack(((torch.full((2, 3), 2.0),),))
    assert third.data_ptr() == first.data_ptr()
    assert torch.equal(packing.unpack(third)[0][0], torch.full((2, 3), 2.0))
    assert torch.equal(packing.unpack(second)[0][0], torch.ones(2, 3))


def test_a_message_of_another_form_is_refused() -> None:
    packing = Packing(((TensorSpec((2, 3), torch.float32),),), CPU, "the message of stage 1 to stage 2")
    for other in (torch.zeros(3, 3), torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ModelError, match=r"stage 1 to stage 2: expected float32\[2, 3\], got float"):
            packing.pack(((other,),))
    with pytest.raises(ValueError, match="argument"):
        packing.pack(((torch.zeros(2, 3), torch.zeros(2, 3)),))


@pytest.mark.parametrize("channels_last", [False, True])
def test_smaller_types_in_messages_round_alike_in_and_between_processes(channels_last: bool) -> None:
    image = TensorSpec((2, 3, 5, 4), torch.float32, channels_last, message_format="bf16")
    spec = ((image, image), (TensorSpec((3,), torch.float64),))
    images, report = torch.randn(2, 2, 3, 5, 4), torch.randn(3).double()
    message = ((images[0], images[1]), (report,))
    packing = Packing(spec, CPU, "test")
    full = Packing((tuple(replace(image, message_format=None) for _ in range(2)), spec[1]), CPU, "test")
    assert packing.bytes - 64 == (full.bytes - 64) // 2  # the report takes 64
    received = packing.unpack(packing.pack(message))
    upstream, downstream = local_boundary(spec, spec)
    upstream.send(0, message)
    assert_equal(received[0], tuple(images.bfloat16().float()))
    assert_equal(downstream.receive(0)[0], received[0])
    assert torch.equal(received[1][0], report)
    assert "float32[2, 3, 5, 4] as bf16" in str(image)


def test_int8_travels_forward_with_one_scale_per_tensor() -> None:
    """Boundaries, packing and cost model take the bytes from the table of formats."""
    numerics, image, x = Numerics(message_format="int8"), TensorSpec((2, 3, 5, 4), torch.float32), torch.randn(2, 3, 5, 4)
    found = boundary([image, image], Keep.NOTHING, numerics, metrics=1)
    assert (found.forward_bytes, found.backward_bytes) == (2 * (120 + 4), 4 * 4 * 120)
    packing, (downstream, upstream) = Packing(found.forward, CPU, "test"), local_boundary(*found)
    downstream.send(0, ((x, -x),))
    (received,) = packing.unpack(packing.pack(((x, -x),)))
    assert_equal(upstream.receive(0)[0], received)
    assert_equal((received[1],), (-received[0],))
    scale = x.abs().max() / 127
    assert torch.equal(received[0], torch.fake_quantize_per_tensor_affine(x, scale, torch.tensor(0), -127, 127))
    assert packing.bytes == 2 * (128 + 64)  # both parts aligned to 64
    zeros, infinite = torch.zeros_like(x), torch.where(x == x.max(), torch.inf, x)
    downstream.send(1, ((zeros, infinite),))
    (arrived,) = upstream.receive(1)
    assert torch.equal(arrived[0], zeros)
    assert not arrived[1].isfinite().any()
    costs = pipeline_costs([[b] for b in count_blocks(mixed_net(), RandomSource().spec, numerics)], [[Keep.INPUT]] * 6)
    assert costs[1].forward_bytes < costs[2].backward_bytes / 7  # float64


class Float8(MessageFormat):
    """Elements in float8, with one scale for all streams of a message."""

    def factors(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        return [()]

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        scale = torch.stack([t.abs().max() for t in tensors]).max() / 448
        return [*(t / scale for t in tensors), scale]

    def unpack(self, pieces: Sequence[Tensor], forms: Sequence[Form]) -> Sequence[Tensor]:
        *elements, scale = pieces
        return [e.to(dtype) * scale for e, (_, dtype) in zip(elements, forms, strict=True)]


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_format_may_have_one_scale_per_message(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MESSAGE_FORMATS, "float8", Float8("float8_e4m3fn", both_directions=False))
    numerics, image = Numerics(message_format="float8", channels_last=channels_last), TensorSpec((2, 3, 5, 4), torch.float32)
    found = boundary([image, image, TensorSpec((2,), torch.int64)], Keep.INPUT, numerics, metrics=1)
    assert (found.forward_bytes, found.backward_bytes) == (2 * 120 + 4 + 16, 2 * 4 * 120)
    x, side = torch.randn(2, 2, 3, 5, 4), torch.tensor([3, 4])
    packing, (downstream, upstream) = Packing(found.forward, CPU, "test"), local_boundary(*found)
    downstream.send(0, ((x[0], x[1] / 8, side),))
    (received,) = packing.unpack(packing.pack(((x[0], x[1] / 8, side),)))
    assert_equal(upstream.receive(0)[0], received)
    scale = max(x[0].abs().max(), x[1].abs().max() / 8) / 448
    assert torch.equal(received[1], (x[1] / 8 / scale).to(torch.float8_e4m3fn).float() * scale)
    assert torch.equal(received[2], side)
    assert received[0].is_contiguous(memory_format=torch.channels_last) == channels_last


def test_what_is_passed_on_inside_a_process_owns_its_memory() -> None:
    """Views of a message of another process would keep all of it alive until the neighbour's backward pass."""
    empty, transport = Boundary((), ()), SimpleNamespace(upstream=None, downstream=object())
    ports = connect(range(2), object(), object(), [empty, empty], transport)  # type: ignore[arg-type]
    received = torch.arange(8.0).view(4, 2)
    ports[1][0].send(0, ((received[0],), (received[1],), (torch.ones(2),)))
    (x,), (delta,), _ = ports[0][1].receive(0)
    assert (x.tolist(), delta.tolist()) == ([0, 1], [2, 3])
    assert x.untyped_storage().nbytes() == x.nbytes
    assert delta.untyped_storage().nbytes() == delta.nbytes


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


class Lost:
    """Handle of an operation whose neighbour has died."""

    def wait(self) -> None:
        raise RuntimeError("Connection reset by gloo")


@pytest.mark.parametrize(("rank", "failing"), [(0, "sending"), (1, "exchanging")])
def test_errors_of_an_exchange_name_the_microbatch_of_the_message(rank: int, failing: str) -> None:
    """A send that fails is found in the next exchange. A rank that only receives has sent nothing."""

    def post(operations: object) -> list[Lost]:
        if failing == "exchanging":
            raise RuntimeError("Connection reset by gloo")
        return [Lost()]

    spec = ((TensorSpec((2,), torch.float32),),)
    down, up = (Packing(spec, CPU, f"the message of stage {a} to stage {b}") for a, b in ((1, 2), (2, 1)))
    transport = LockstepTransport([(down, up, 2)], [range(1), range(1, 2)], rank, post=post)  # type: ignore[arg-type]

    def run() -> None:
        for m in (5, 6):
            if transport.downstream is not None:
                transport.downstream.send(100 + m, ((torch.ones(2),),))
            transport.exchange(transport.transfers([Step(2 * m, 0, Op.FORWARD, m)]), 100)

    with pytest.raises(CommunicationError, match=f"{failing} the message of stage 1 to stage 2( and back)?, microbatch 105"):
        run()
