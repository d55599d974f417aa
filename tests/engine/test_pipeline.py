from functools import cache
from itertools import cycle, product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from petra import METHODS, DataError, Keep, Method, Model, ModelError, PetraError, Weights
from petra.models import MODELS
from petra.reversible import Coupling, derive_seed, seeded
from petra.settings import Runtime
from petra.specs import Streams
from tests.support.nets import (
    RandomSource,
    Recorder,
    assert_plain_gradients,
    double,
    gradients,
    make_pipeline,
    mixed,
    mixed_net,
    sgd,
    train_plainly,
)
from tests.support.pairs import all_pairs
from tests.support.refusals import refuses


def variants() -> dict[str, Method]:
    """The named methods, and all pairs of switches."""
    made = dict(METHODS)
    for delay, keep, weights in all_pairs((0, 1, 2, (3, 0, 1, 2, 1)), (Keep.GRAPH, Keep.INPUT, Keep.NOTHING), list(Weights)):
        if (delay, weights) == (2, Weights.DOUBLE):  # seven microbatches are too few for two versions
            weights = Weights.STASHED
        made[f"d={delay} {keep} {weights}"] = Method("x", delay, keep, weights)
    for keep in (Keep.GRAPH, Keep.INPUT, Keep.NOTHING):
        made[f"flush {keep}"] = Method("x", 1, keep, flush=True)
        made[f"fill {keep}"] = Method("x", 0, keep, flush=True, fill=True)
    return made


def replayed(chain: nn.Module, m: int, x: Tensor, seed: int) -> Tensor:
    """Return the output under plain autograd, with the random numbers that the engine draws."""
    streams: Streams = (x,)
    for i, block in enumerate(chain.children()):
        block_seed = derive_seed(derive_seed(seed, i), m)
        if isinstance(block, Coupling) or hasattr(block, "_halves"):
            streams = block(*streams, seed=block_seed)
        else:
            with seeded(block_seed):
                out = block(*streams)
            streams = out if isinstance(out, tuple) else (out,)
    return streams[0]


@cache
def accumulated(k: int) -> nn.Module:
    """Return the plain network with the mean gradient of ``k`` microbatches."""
    plain, data = mixed_net(dropout=0.3).build(3), RandomSource()
    for m in range(k):
        (F.cross_entropy(replayed(plain, m, data.inputs(m), 3), data.targets(m)) / k).backward()
    return plain


@pytest.mark.parametrize("name", variants())
def test_frozen_weights_give_the_plain_gradient(name: str) -> None:
    """Invariant 2, with masks of dropout and running statistics."""
    model, data, k = mixed_net(dropout=0.3), RandomSource(), 7
    pipeline = make_pipeline(model, data.spec, method=variants()[name], k=k, optimizer=Recorder, seed=3)
    pipeline.train(data, k)
    plain = accumulated(k)
    expected = {key: p.grad for key, p in plain.named_parameters()}
    torch.testing.assert_close(gradients(pipeline), expected, rtol=1e-9, atol=1e-11)
    statistics = dict(plain.named_buffers())
    torch.testing.assert_close({key: pipeline.state_dict()[key] for key in statistics}, statistics, rtol=1e-9, atol=1e-11)


@cache
def plainly_trained(k: int) -> tuple[nn.Module, list[float]]:
    """Return the plain network after eleven microbatches, with an update after every ``k``, and their losses."""
    plain = mixed_net().build(3)
    return plain, train_plainly(plain, sgd(plain), RandomSource(), 11, k)


EXACT = {
    name: method
    for name, method in variants().items()
    if method.flush or (method.delay == 0 and method.weights is not Weights.DOUBLE)
}


@pytest.mark.parametrize(("name", "shape"), [*zip(EXACT, cycle(product([None, 2, 1], [1, 3])), strict=False)])
def test_without_staleness_training_is_plain_training(name: str, shape: tuple[int | None, int]) -> None:
    """Invariant 3, over two calls that k does not divide: a partial accumulation is carried over."""
    method, (stages, k) = EXACT[name], shape
    model, data = mixed_net(), RandomSource()
    pipeline = make_pipeline(model, data.spec, method=method, k=k, stages=stages, optimizer=sgd, seed=3)
    results = [pipeline.train(data, 4), pipeline.train(data, 7)]
    assert [r.targets for r in results] == [16, 28]
    plain, losses = plainly_trained(k)
    torch.testing.assert_close([r.loss for r in results], [sum(losses[:4]) / 4, sum(losses[4:]) / 7], rtol=1e-9, atol=0)
    torch.testing.assert_close(pipeline.state_dict(), plain.state_dict(), rtol=1e-8, atol=1e-10)


NETWORKS = {
    **{name: {"width": 1 / 32} for name in ("resnet34", "resnet50", "revnet34", "revnet50")},
    **{f"revnet50 {kind}": {"width": 1 / 32, "downsampling": kind} for kind in ("pooling", "variant")},
    "resnet32": {"width": 1 / 16},
    "resnet164": {"width": 1 / 16},
    "revnet38": {"width": 1 / 8},
}


@pytest.mark.parametrize("network", NETWORKS)
def test_every_kind_of_network_gives_its_plain_gradient(network: str) -> None:
    """Cut down to the first two blocks of each layer: the rest are of the same kinds."""
    model = MODELS[network.split()[0]](classes=5, **NETWORKS[network])
    kept = [b for b in model.blocks if b.name in ("stem", "head") or b.name.endswith(("_0", "_1"))]
    assert len(kept) > 6, "no blocks between stem and head"
    pipeline = assert_plain_gradients(double(Model(network, tuple(kept))), RandomSource(batch=2, size=32), 2, rtol=1e-7, atol=1e-9)
    assert ("rev" in network) == any(Keep.NOTHING in stage.keeps for stage in pipeline.plan.stages)


def test_what_an_error_left_on_its_way_is_not_trained_on() -> None:
    class Ends(RandomSource):
        def targets(self, m: int) -> Tensor:
            if m == 5:
                raise DataError("no more")
            return super().targets(m)

    for method in ("train", "evaluate"):
        pipeline = mixed()
        with pytest.raises(DataError):
            getattr(pipeline, method)(Ends(), 9)
        assert all(stage.module.training for stage in pipeline.stages.values())
        with pytest.raises(PetraError, match="pipeline: expected a new one, got one whose last run ended in an error"):
            pipeline.train(RandomSource(), 4)


test_settings_that_cannot_work_are_refused = refuses(
    lambda change: mixed(**change),
    ({"k": 0}, "k: expected an integer >= 1, got 0"),
    ({"method": Method("x", (1, 2), Keep.GRAPH, flush=True, fill=True)}, "got 2 delays"),
    ({"stages": 7}, "stages: expected 1 to 6, .*, got 7"),
    ({"method": "petri"}, "method: expected petra, .*, got petri"),
    ({"runtime": Runtime(transport="edge")}, "transport: expected auto or local in one process, got edge"),
    ({"method": "pipedream_2bw", "k": 4}, "k: expected an integer >= 5 .*the delay of stage 1.*, got 4"),
)


def test_data_of_another_form_is_refused() -> None:
    pipeline = mixed()
    with pytest.raises(ModelError, match=r"microbatch 0: expected float64\[4, 3, 8, 8\], got float64\[1, 3, 8, 8\]"):
        pipeline.train(RandomSource(batch=1), 2)
