import pytest
import torch

from petra import ModelError
from petra.streams import TensorSpec
from petra.transport import Packing

CPU = torch.device("cpu")


@pytest.mark.parametrize("channels_last", [False, True])
def test_messages_survive_packing(channels_last: bool) -> None:
    image = TensorSpec((2, 3, 5, 4), torch.float32, channels_last)
    spec = ((image, image), (), (TensorSpec((3,), torch.float64), TensorSpec((2, 2), torch.bfloat16)))
    images = torch.randn(2, 2, 3, 5, 4)
    message = ((images[0], images[1]), (), (torch.randn(3).double(), torch.randn(2, 2).bfloat16()))
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


def test_a_message_of_another_form_is_refused() -> None:
    packing = Packing(((TensorSpec((2, 3), torch.float32),),), CPU, "the message of stage 1 to stage 2")
    for other in (torch.zeros(3, 3), torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(ModelError, match=r"stage 1 to stage 2: found float.*, accepted is float32\[2, 3\]"):
            packing.pack(((other,),))
    with pytest.raises(ValueError, match="argument"):
        packing.pack(((torch.zeros(2, 3), torch.zeros(2, 3)),))
