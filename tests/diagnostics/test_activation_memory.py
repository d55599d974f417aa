"""Bytes stored between forward and backward: predicted from shapes, measured during training, and counted by hand."""

from __future__ import annotations

import pytest
import torch

from petra import Keep, Method, TensorSpec, Weights
from petra.analysis.memory import measured, predicted
from petra.diagnostics.activation_memory import graph_bytes
from tests.support.nets import RandomSource, make_pipeline, mixed_net

METHODS = [
    (Method("petra", 2, Keep.NOTHING), 1),
    (Method("backprop", 0, Keep.GRAPH), 2),
    (Method("pipemare", 2, Keep.GRAPH), 1),
    (Method("dsp", 1, Keep.INPUT), 2),
    (Method("1f1b", 1, Keep.GRAPH, flush=True), 3),
    (Method("gpipe", 0, Keep.GRAPH, flush=True, fill=True), 4),
    (Method("mixed", 1, (Keep.INPUT, Keep.GRAPH, Keep.NOTHING, Keep.NOTHING, Keep.GRAPH, Keep.GRAPH)), 2),
]


@pytest.mark.parametrize(("method", "k"), METHODS, ids=[m.name for m, _ in METHODS])
def test_predicted_bytes_are_those_measured(method: Method, k: int) -> None:
    data = RandomSource()
    pipeline = make_pipeline(
        mixed_net(), data.spec, method=method, k=k, stages=3, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    found = measured(pipeline, data, 2 * max(pipeline.plan.delays) + 2 * k)
    assert found == [stage.stored for stage in predicted(pipeline.plan)]


def test_bytes_counted_by_hand() -> None:
    """mixed_net, batch 4 of 8x8 images in float64: a stream of block1 has 4·4·8·8 elements, one of block3 has 4·8·4·4."""
    model, data, number = mixed_net(), RandomSource(), 8
    stream, wide = 4 * 4 * 8 * 8 * number, 4 * 8 * 4 * 4 * number
    pair = [TensorSpec((4, 4, 8, 8), torch.float64)] * 2
    assert graph_bytes(model, range(1, 2), pair, [Keep.NOTHING]) == 0
    assert graph_bytes(model, range(1, 2), pair, [Keep.INPUT]) == 2 * stream
    # Inputs x1 and x2; the convolution's output, saved by the normalisation with mean and deviation; tanh's output; the sum.
    assert graph_bytes(model, range(1, 2), pair, [Keep.GRAPH]) == 5 * stream + 2 * 4 * number
    wide_pair = [TensorSpec((4, 8, 4, 4), torch.float64)] * 2
    one = graph_bytes(model, range(4, 5), wide_pair, [Keep.GRAPH])
    assert one == 5 * wide + 2 * 8 * number
    assert graph_bytes(model, range(0, 1), [data.spec], [Keep.INPUT]) == data.spec.bytes


def test_stashed_weights_count() -> None:
    data = RandomSource()

    def made(weights: Weights) -> list[int]:
        method = Method("x", 2, Keep.INPUT, weights)
        pipeline = make_pipeline(mixed_net(), data.spec, method=method, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        return measured(pipeline, data, 30)

    more = [a - b for a, b in zip(made(Weights.STASHED), made(Weights.CURRENT), strict=True)]
    block1 = mixed_net().build_block(1, 0)
    assert more[1] == pytest.approx(8 * 8 * sum(p.numel() for p in block1.parameters()), rel=0.2)  # τ = 8 versions
    assert min(more[:5]) > 0
