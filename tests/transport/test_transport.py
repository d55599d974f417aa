import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from petra import Keep, ModelError
from petra.engine.build import make_stage
from petra.plan.messages import Boundary
from petra.reversible import Coupling
from petra.specs import TensorSpec
from petra.transport import Packing, connect, local_boundary
from tests.support.nets import branch

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
    for part, sent in zip(received, message, strict=True):
        for a, b in zip(part, sent, strict=True):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
            assert a.data_ptr() % 64 == buffer.data_ptr() % 64
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
def test_smaller_types_on_the_wire_round_alike_in_and_between_processes(channels_last: bool) -> None:
    image = TensorSpec((2, 3, 5, 4), torch.float32, channels_last, wire=torch.bfloat16)
    spec = ((image, image), (TensorSpec((3,), torch.float64),))
    images, report = torch.randn(2, 2, 3, 5, 4), torch.randn(3).double()
    message = ((images[0], images[1]), (report,))
    packing = Packing(spec, CPU, "test")
    full = Packing((tuple(replace(image, wire=None) for _ in range(2)), spec[1]), CPU, "test")
    assert packing.bytes - 64 == (full.bytes - 64) // 2  # the report takes 64
    received = packing.unpack(packing.pack(message))
    upstream, downstream = local_boundary(spec, spec)
    upstream.send(0, message)
    for a, b, sent in zip(received[0], downstream.receive(0)[0], images, strict=True):
        assert torch.equal(a, sent.bfloat16().float())
        assert torch.equal(a, b)
        assert a.dtype == b.dtype == torch.float32
    assert torch.equal(received[1][0], report)
    assert "float32[2, 3, 5, 4] as bfloat16" in str(image)


def test_reconstruction_from_rounded_streams_is_off_by_their_rounding() -> None:
    """What a bf16 wire costs: 8 bits of significand, so relative errors near 2^-9 where float32 has 2^-24."""
    torch.manual_seed(0)
    errors = {}
    for wire in (torch.float32, torch.bfloat16):
        stage = make_stage([Coupling(branch(8)) for _ in range(4)], [Keep.NOTHING] * 4, first_block=1)
        x = tuple(torch.randn(4, 8, 8, 8).to(wire).float() for _ in range(2))
        y = tuple(t.to(wire).float() for t in stage.forward(0, x))
        back, _ = stage.backward(0, y, y)
        errors[wire] = max(float((a - b).norm() / b.norm()) for a, b in zip(back, x, strict=True))
    assert errors[torch.float32] < 1e-6
    assert 2**-10 < errors[torch.bfloat16] < 2**-5


@pytest.mark.processes
def test_a_process_group_that_is_older_than_the_import_ends_when_it_is_destroyed(tmp_path: Path) -> None:
    """torch.distributed.nn would keep it alive."""
    script = f"""import gc, weakref, petra, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
petra.Pipeline
assert dist.is_initialized()
dist.destroy_process_group()
gc.collect()
assert group() is None
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_what_is_passed_on_inside_a_process_owns_its_memory() -> None:
    """Views of a message of another process would keep all of it alive until the neighbour's backward pass."""
    boundary, transport = Boundary((), ()), SimpleNamespace(upstream=None, downstream=object())
    ports = connect(range(2), object(), object(), [boundary, boundary], transport)  # type: ignore[arg-type]
    received = torch.arange(8.0).view(4, 2)
    ports[1][0].send(0, ((received[0],), (received[1],), (torch.ones(2),)))
    (x,), (delta,), _ = ports[0][1].receive(0)
    assert (x.tolist(), delta.tolist()) == ([0, 1], [2, 3])
    assert x.untyped_storage().nbytes() == x.nbytes
    assert delta.untyped_storage().nbytes() == delta.nbytes
