"""Narrow streams: the inverse, gradients against autograd, messages, anchors in processes, exports and the memory model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import DataError, Model, Numerics, Pipeline, TensorSpec
from petra.cost_model.memory import predict_memory
from petra.cost_model.stage_memory import LiveBytes
from petra.models import gpt, revgpt
from petra.models.narrow import Anchors, NarrowBranch
from petra.plan import make_plan
from petra.reversible import ReversibleBlock
from petra.training.weight_files import export, load, load_into
from tests.support.nets import RandomTokens, assert_equal, assert_plain_gradients, double, make_pipeline, sgd
from tests.support.processes import run_processes
from tests.support.refusals import refuses

CLASSES, LENGTH, BATCH, DIM, STREAM = 11, 12, 3, 24, 6
TEXTS = RandomTokens(BATCH, LENGTH, CLASSES)
MODERN = {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "positions": "rotary", "qk_norm": True, "delimiter": 0}
SHAPE: dict[str, Any] = {"classes": CLASSES, "dim": DIM, "depth": 4, "heads": 4, "size": LENGTH, "embedding_std": 0.4}


def network(build: Callable[..., Model] = revgpt, **options: Any) -> Model:
    return build(**{**SHAPE, "stream": STREAM, **MODERN, **options})


def test_layers_are_inverted_for_any_anchors_and_lifts() -> None:
    layer = double(network()).build_block(1, 0)
    assert isinstance(layer, ReversibleBlock)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.3)
    tokens = torch.randint(0, CLASSES, (BATCH, LENGTH), dtype=torch.int32)
    x = *(torch.randn(BATCH, LENGTH, STREAM, dtype=torch.float64) for _ in range(2)), tokens
    y = layer(*x)
    assert y[2] is tokens
    torch.testing.assert_close(layer.inverse(*y)[:2], x[:2], rtol=0, atol=1e-12)
    assert (y[0] - x[0]).norm() > 0.1 * x[0].norm()


@pytest.mark.parametrize(
    ("build", "method", "options"),
    [
        (revgpt, "petra", {}),
        (revgpt, "dsp", {"wide_layers": 2, "head": "sum"}),
        (revgpt, "reversible", {"head": "last"}),
        (revgpt, "petra", {"wide_layers": 1, "positions": "learned", "delimiter": None}),
        (gpt, "dsp", {}),
        (gpt, "petra", {"wide_layers": 4}),
    ],
)
def test_frozen_weights_give_the_plain_gradient(build: Any, method: str, options: dict[str, Any]) -> None:
    assert_plain_gradients(double(network(build, **options)), TEXTS, 5, method=method)


def test_a_branch_reads_anchor_and_lifted_stream() -> None:
    branch = double(network()).build_block(1, 0).f
    assert isinstance(branch, NarrowBranch)
    z, tokens = torch.randn(1, LENGTH, STREAM, dtype=torch.float64), torch.arange(LENGTH)[None] % 5
    wide = branch.read.anchors.table[tokens] + z @ branch.read.lift.weight.T
    starts = tokens == 0
    torch.testing.assert_close(branch(z, tokens), branch.branch(wide, starts))
    assert not torch.allclose(branch(z, tokens), branch(z, tokens.clamp(max=3)))
    gram = branch.read.lift.weight.T @ branch.read.lift.weight
    torch.testing.assert_close(gram, torch.eye(STREAM, dtype=torch.float64) * DIM / STREAM, rtol=1e-5, atol=1e-5)


def test_messages_have_the_streams_and_four_bytes_per_token() -> None:
    tokens = BATCH * LENGTH
    for build, count in ((revgpt, 2), (gpt, 1)):
        plan = make_plan(network(build), TEXTS.spec, method="petra", stages=3, processes=3)
        for boundary in plan.boundaries:
            assert boundary.forward_bytes == tokens * (4 * count * STREAM + 4)
            assert boundary.backward_bytes == tokens * 4 * count * STREAM * (2 if build is revgpt else 1)
    plan = make_plan(network(wide_layers=2), TEXTS.spec, method="dsp", stages=[3, 4], processes=2)
    assert plan.boundaries[0].forward_bytes == tokens * (8 * STREAM + 4)


def hashed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_anchors_are_those_of_the_hash(seed: int) -> None:
    table = network(anchor_seed=seed).build_block(1, 5).f.read.anchors.table
    mixed = hashed((seed % 2**32) ^ (seed >> 32))
    for token, channel in ((0, 0), (3, 17), (CLASSES - 1, DIM - 1)):
        bits = hashed((hashed(token ^ mixed) + channel) % 2**32)
        assert table[token, channel].item() == pytest.approx(((bits >> 8) / 2**24 - 0.5) * 12**0.5 * 0.2, rel=1e-6)


def test_anchors_are_evenly_distributed_and_one_tensor_per_process() -> None:
    chain = network(anchor_seed=9, classes=2000, dim=64).build(0)
    tables = [module.table for module in chain.modules() if isinstance(module, Anchors)]
    assert len(tables) == 2 * 4 + 2 + 1
    assert len({t.data_ptr() for t in tables}) == 1
    table = tables[0]
    assert table.std().item() == pytest.approx(0.2, rel=0.01)
    assert abs(table.mean().item()) < 0.002
    correlations = torch.corrcoef(table).fill_diagonal_(0)
    assert correlations.std().item() == pytest.approx(64**-0.5, rel=0.05)  # as of independent vectors
    other = chain.double()
    assert len({module.table.data_ptr() for module in other.modules() if isinstance(module, Anchors)}) == 1
    emptied = network(anchor_seed=9, classes=2000, dim=64).build(0).to_empty(device="cpu")
    assert torch.equal(emptied.stem.anchors.table, table)


def trained(rank: int, transport: str = "auto") -> dict[str, Tensor]:
    numerics, inputs = (Numerics(), Numerics(message_format="bf16")), TensorSpec((BATCH, LENGTH), torch.int64)
    found = {}
    for i, (build, method) in enumerate(((revgpt, "petra"), (gpt, "dsp"))):
        model, settings = network(build, wide_layers=i, anchor_seed=3), {"method": method, "k": 2, "stages": 3}
        runtime = {"numerics": numerics[1 - i], **settings}
        pipeline = make_pipeline(model, inputs, optimizer=sgd, seed=6, **runtime)
        pipeline.train(TEXTS, 6)
        result = pipeline.evaluate(TEXTS, 2).loss
        found |= {f"{method}.{key}": value for key, value in pipeline.state_dict().items()} | {method: torch.tensor(result)}
    return found


@pytest.mark.processes
def test_one_process_equals_several(tmp_path: Path) -> None:
    parts = run_processes(3, trained, tmp_path)
    assert_equal({key: value for part in parts for key, value in part.items()}, trained(0))


def narrow_pipeline(**options: Any) -> Pipeline:
    return make_pipeline(network(**options), TEXTS.spec, optimizer=sgd, stages=3)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_exports_have_the_anchors_once_and_are_loaded(tmp_path: Path, suffix: str) -> None:
    pipeline, path = narrow_pipeline(anchor_seed=1), tmp_path / f"model{suffix}"
    pipeline.train(TEXTS, 4)
    export(pipeline, path)
    state = load(path)
    assert [key for key in state if "anchors" in key] == ["stem.anchors.table"]
    again = narrow_pipeline(anchor_seed=1)
    load_into(again, state, "model")
    assert again.evaluate(TEXTS, 2) == pipeline.evaluate(TEXTS, 2)
    with pytest.raises(
        DataError, match=r"block stem does not fit .*anchors.table has those of another anchor_seed or embedding_std"
    ):
        load_into(narrow_pipeline(anchor_seed=2), state, "model")


@pytest.mark.parametrize("stages", [1, 3])
def test_memory_counts_anchors_once_per_process(stages: int) -> None:
    model = network(classes=1000, anchor_seed=100 + stages, stream=4, hidden=8)
    with LiveBytes() as live:
        pipeline = make_pipeline(model, TEXTS.spec, optimizer=sgd, stages=stages, k=2)
        pipeline.train(TEXTS, 12)
    (found,) = predict_memory(pipeline.plan, pipeline.recipe, TensorSpec((BATCH * LENGTH,), torch.int64))
    assert live.most <= found.tensors <= 1.09 * live.most
    state = sum(t.nbytes for t in pipeline.state_dict().values())  # has the table once, and the memory of all would be 11 of them
    assert state <= found.weights <= state + 512 * 60


def test_the_check_of_the_inverse_and_a_second_network_leave_the_anchors_alone() -> None:
    """The first microbatches need no second table, and a run that generates samples doesn't count as changed from outside."""
    pipeline = make_pipeline(network(classes=8000, anchor_seed=7), RandomTokens(BATCH, LENGTH, 8000).spec, optimizer=sgd, stages=3)
    table = next(module.table for module in pipeline.stages[1].module.modules() if isinstance(module, Anchors))
    version, most = table._version, list[int]()
    for _ in range(2):
        with LiveBytes() as live:
            pipeline.train(RandomTokens(BATCH, LENGTH, 8000), 8)
        most.append(live.most)
    assert most[0] < most[1] + table.nbytes // 2
    pipeline.plan.model.build(1).load_state_dict(pipeline.state_dict())
    assert table._version == version


test_invalid_options = refuses(
    lambda build, arguments: build(**arguments),
    (revgpt, {"stream": 385}, r"model\.stream: expected null or an integer from 1 to 384 \(model\.dim\), got 385"),
    (gpt, {"anchor_seed": 1}, r"model\.anchor_seed: expected 0 without model\.stream, got 1"),
    (revgpt, {"wide_layers": 1}, r"model\.wide_layers: expected 0 without model\.stream, got 1"),
    (revgpt, {"wide_layers": 7, "stream": 4}, r"model\.wide_layers: expected an integer from 0 to 6 \(model\.depth\), got 7"),
)
