"""Bytes stored between forward and backward: predicted from shapes, measured during training, and counted by hand."""

import pytest

from petra import Keep, Method, Weights
from petra.cost_model.memory import stored_activations
from petra.diagnostics.process_memory import rounded
from reproduction.stored_memory import measured
from tests.support.nets import RandomSource, mixed, mixed_net

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
    pipeline = mixed(method=method, k=k, stages=3)
    found = measured(pipeline, RandomSource(), 2 * max(pipeline.plan.delays) + 2 * k)
    assert found == stored_activations(pipeline.plan)


def test_stashed_weights_count() -> None:
    def made(weights: Weights) -> list[int]:
        return measured(mixed(method=Method("x", 2, Keep.INPUT, weights)), RandomSource(), 30)

    more = [a - b for a, b in zip(made(Weights.STASHED), made(Weights.CURRENT), strict=True)]
    block1 = mixed_net().build_block(1, 0)
    assert more[1] == 8 * sum(rounded(p.nbytes) for p in block1.double().parameters())  # τ = 8 versions
    assert min(more[:5]) > 0
