"""Drawn losses, random numbers and calls of ``train``: results are plain PyTorch's, or an error says what does not fit."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from petra import Model, ModelError
from petra.reversible import Coupling
from tests.engine.test_any_block import FLAT, Halves, Vectors, linear
from tests.engine.test_user_faults import saliency, zero_grad
from tests.support.nets import make_pipeline, sgd, train_plainly


def small() -> Model:
    """Return a model of one coupling without statistics."""
    torch.manual_seed(0)
    coupling = Coupling(nn.Sequential(linear(3, 3), nn.Tanh()))
    return Model.of("mine", {"stem": Halves(), "c0": coupling, "merge": Halves(), "head": linear(6, 3)})


TERMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # of output, a weight of the model and a parameter of the loss
    "output": lambda y, weight, own: y.square().mean(),
    "detached": lambda y, weight, own: y.detach().square().mean() * y.mean(),
    "without gradient": lambda y, weight, own: weight.detach().square().sum() + own.detach() * y.sum(),
    "weight": lambda y, weight, own: weight.square().sum(),
    "factor": lambda y, weight, own: (y * own).mean(),
    "both": lambda y, weight, own: (y.mean() * own + weight.sum()).exp(),
}


@settings(max_examples=7)
@given(
    terms=st.dictionaries(st.sampled_from([*TERMS]), st.integers(0, 7), min_size=1, max_size=3),
    method=st.sampled_from(["backprop", "reversible"]),
)
def test_a_drawn_loss_trains_as_in_plain_pytorch_or_is_refused(terms: dict[str, int], method: str) -> None:
    """Draw terms of the loss, of which some have leaves beside the output, the microbatch at which each begins, and a method."""
    foreign = min((begins for term, begins in terms.items() if term in ("weight", "factor", "both")), default=None)
    own, model = nn.Parameter(torch.ones(()).double()), small()
    weight: list[Tensor] = []

    def loss(calls: list[int], y: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        own_terms = [TERMS[term](y, weight[0], own) for term, begins in terms.items() if begins < len(calls)]
        return torch.stack([F.cross_entropy(y, t), *own_terms]).sum()

    pipeline = make_pipeline(model, FLAT, optimizer=sgd, method=method, loss=partial(loss, []), k=2)
    weight += [p for name, block in pipeline.blocks() if name == "head" for p in block.parameters()]
    if foreign is not None:
        with pytest.raises(ModelError, match=r"^loss: expected a function of outputs and targets"):
            pipeline.train(Vectors(), 8)
        assert pipeline.microbatches_done <= foreign
        return
    pipeline.train(Vectors(), 8)
    plain = model.build(0)
    weight[:] = plain.get_submodule("head").parameters()
    train_plainly(plain, sgd(plain), Vectors(), 8, 2, partial(loss, []))
    torch.testing.assert_close(pipeline.state_dict(), dict(plain.state_dict()), rtol=1e-9, atol=1e-12)


def drawn(kinds: dict[int, str], found: dict[int, list[Tensor]], m: int, y: Tensor) -> Tensor:
    """Return a block's output for a microbatch, with the random numbers of its kind, and keep a copy."""
    kind = kinds.get(m)
    if kind == "dropout":
        y = F.dropout(y, 0.5)
    if kind == "noise":
        y = y + torch.randn_like(y)
    if kind == "scalar":
        y = y * torch.rand(1).double()
    found.setdefault(m, []).append(y.detach().clone())
    return y


class Drawing(nn.Module):
    """Draws random numbers in some microbatches, whose numbers are the entries of its input."""

    def __init__(self, width: int, draw: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = linear(width, width), draw

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y if x.is_meta else self.draw(int(x[0, 0]), y)


@settings(max_examples=8)
@given(
    kinds=st.dictionaries(st.integers(0, 11), st.sampled_from(["dropout", "noise", "scalar"]), max_size=6),
    method=st.sampled_from(["reversible", "petra", "dsp", "delayed", "pipedream_2bw"]),
    calls=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    inside=st.booleans(),
)
def test_drawn_random_numbers_are_the_same_in_both_passes(
    kinds: dict[int, str], method: str, calls: list[int], inside: bool
) -> None:
    """Draw in which microbatches a block draws random numbers and what, a method, calls of ``train``, and the kind of the block."""
    data, found, k = Vectors(), dict[int, list[Tensor]](), 4
    data.inputs = lambda m: torch.full((4, 6), float(m)).double()  # type: ignore[method-assign]
    drawing = Drawing(3 if inside else 6, lambda m, y: drawn(kinds, found, m, y))
    blocks = {"stem": Halves(), "c0": Coupling(drawing), "merge": Halves()} if inside else {"b0": drawing, "b1": linear()}
    model = Model.of("mine", {**blocks, "head": linear(6, 3)})
    pipeline = make_pipeline(model, FLAT, optimizer=sgd, learning_rate=lambda t: 0.0, method=method, k=k)
    for updates in calls:
        begin = pipeline.microbatches_done
        pipeline.train(data, k * updates)
        first = min((m for m in kinds if begin <= m < pipeline.microbatches_done), default=None)
        if first is not None and not inside and len(found[first]) > 2:  # shows that the block draws, and is evaluated again
            del found[first][0]
    assert sorted(found) == [*range(k * sum(calls))]
    for outputs in found.values():
        assert len(outputs) > 1
        torch.testing.assert_close(outputs, outputs[:1] * len(outputs), rtol=1e-12, atol=1e-12)


@settings(max_examples=10)
@given(
    calls=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["nothing", "zero_grad", "backward"]), st.integers(1, 3)), max_size=4
    ),
    method=st.sampled_from(["backprop", "reversible"]),
)
def test_drawn_calls_give_what_one_call_gives(calls: list[tuple[int, str, int]], method: str) -> None:
    """Draw calls of ``train`` with their microbatches, complete updates or not, and the caller's own backward passes after them."""
    model, k = small(), 2
    pipeline, plain = make_pipeline(model, FLAT, optimizer=sgd, method=method, k=k), model.build(0)
    for count, act, times in calls:
        pipeline.train(Vectors(), count)
        if act == "zero_grad":
            zero_grad(pipeline)
        for _ in range(times if act == "backward" else 0):
            saliency(pipeline)
        if act == "backward" and pipeline.microbatches_done % k:
            with pytest.raises(ModelError, match=r"\.grad: expected that of a part of an update, as train left it"):
                pipeline.train(Vectors(), 1)
            return
    pipeline.train(Vectors(), 3)
    train_plainly(plain, sgd(plain), Vectors(), pipeline.microbatches_done, k)
    torch.testing.assert_close(pipeline.state_dict(), dict(plain.state_dict()), rtol=1e-9, atol=1e-12)
