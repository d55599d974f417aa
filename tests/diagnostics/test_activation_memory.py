"""Bytes stored between forward and backward: predicted from shapes, measured during training, and counted by hand."""

from __future__ import annotations

import pytest
import torch

from petra import Keep, Method, Pipeline, TensorSpec, Weights
from petra.analysis.memory import buffers, measured, predicted, table3
from petra.diagnostics.activation_memory import graph_bytes
from petra.models import revnet18, revnet50
from tests.support.nets import RandomSource, mixed_net

IMAGENET = TensorSpec((64, 3, 224, 224), torch.float32)
METHODS = [
    (Method("petra", 2, Keep.NOTHING), 1),
    (Method("backprop", 0, Keep.GRAPH), 2),
    (Method("pipemare", 2, Keep.GRAPH), 1),
    (Method("dsp", 1, Keep.INPUT), 2),
    (Method("1f1b", 1, Keep.GRAPH, flush=True), 3),
    (Method("gpipe", 0, Keep.GRAPH, flush=True, fill=True), 4),
    (Method("mixed", 1, (Keep.INPUT, Keep.GRAPH, Keep.NOTHING, Keep.NOTHING, Keep.GRAPH, Keep.GRAPH)), 2),
]


@pytest.mark.parametrize("stages", [None, 3])
@pytest.mark.parametrize(("method", "k"), METHODS, ids=[m.name for m, _ in METHODS])
def test_predicted_bytes_are_those_measured(method: Method, k: int, stages: int | None) -> None:
    data = RandomSource()
    pipeline = Pipeline(
        mixed_net(), data.spec, method=method, k=k, stages=stages, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
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
        pipeline = Pipeline(mixed_net(), data.spec, method=method, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        return measured(pipeline, data, 30)

    more = [a - b for a, b in zip(made(Weights.STASHED), made(Weights.CURRENT), strict=True)]
    block1 = mixed_net().build_block(1, 0)
    assert more[1] == pytest.approx(8 * 8 * sum(p.numel() for p in block1.parameters()), rel=0.2)  # τ = 8 versions
    assert min(more[:5]) > 0


def test_autocast_reduces_saved_activations() -> None:
    model, pair = revnet18(width=0.25), [TensorSpec((8, 16, 32, 32), torch.float32)] * 2
    full, half = (graph_bytes(model, range(1, 2), pair, [Keep.GRAPH], autocast=t) for t in (None, torch.bfloat16))
    assert half < full


def test_buffers_of_revnet50() -> None:
    """ImageNet, batch 64, both streams: counted by hand from the sizes of the 18 stages' inputs."""
    found = buffers(revnet50(classes=1000, stem="imagenet"), IMAGENET)
    assert found[True, True] - found[True, False] == found[False, True] - found[False, False]
    number = 4 * 64
    l1, l2, l3, l4 = (number * 2 * channels * side**2 for channels, side in ((256, 56), (512, 28), (1024, 14), (2048, 7)))
    reversible = (30 + 28) * l1 + (24 + 22 + 20) * l2 + (16 + 14 + 12 + 10 + 8) * l3 + (4 + 2) * l4
    assert found[True, False] - found[False, False] == reversible
    assert found[False, False] == number * (34 * 3 * 224**2 + 32 * 128 * 56**2) + 26 * l1 + 18 * l2 + 6 * l3


def test_table_3_matches_the_paper() -> None:
    found = {row: sum(stages) for row, stages in table3(revnet50(classes=1000, stem="imagenet"), IMAGENET).items()}
    assert [round(value / 1e9, 1) for value in found.values()] == [44.5, 43.6, 21.2, 20.3]
    first, *others = found.values()
    assert [round(100 * (1 - value / first), 1) for value in others] == [2.0, 52.3, 54.3]


def test_table_3_stage_by_stage() -> None:
    """mixed_net in float64: only the third stage downsamples, so it alone stores both streams and always buffers its inputs."""
    found, data = table3(mixed_net(), RandomSource().spec), RandomSource().spec.bytes
    stream, wide = 8 * 4 * 4 * 8 * 8, 8 * 4 * 8 * 4 * 4
    inputs = [data, stream, 2 * stream, wide, wide, wide]
    blocks = [mixed_net().build_block(b, 0) for b in range(6)]
    own = [sum(t.nbytes for t in block.state_dict().values() if t.is_floating_point()) for block in blocks]
    weights = [sum(t.nbytes for t in block.parameters()) for block in blocks]
    assert found[False, False] == [o + x + (6 * x if j == 2 else 0) for j, (o, x) in enumerate(zip(own, inputs, strict=True))]
    for (x, p), stages in found.items():
        more = [2 * (5 - j) * (inputs[j] * (x and j != 2) + weights[j] * p) for j in range(6)]
        assert stages == [least + extra for least, extra in zip(found[False, False], more, strict=True)]
