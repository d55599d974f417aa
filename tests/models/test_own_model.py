"""Models of existing modules, and the example of docs/own_model.md."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from petra import BlockSpec, Model, ModelError, TensorSpec
from tests.support.nets import RandomSource, make_pipeline, mixed_net

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def test_a_model_of_existing_modules_trains_copies_of_them() -> None:
    modules = dict(mixed_net().build(5).named_children())
    before = {key: value.clone() for key, value in nn.ModuleDict(modules).state_dict().items()}
    model, data = Model.of("mine", modules), RandomSource()
    profile = model.profile(data.spec)
    assert [block.reversible for block in profile] == [False, True, False, True, True, False]
    pipeline = make_pipeline(
        model, data.spec, method="reversible", optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), seed=8
    )
    pipeline.train(data, 1)

    plain = mixed_net().build(5)
    F.cross_entropy(plain(data.inputs(0)), data.targets(0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for key, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-9, atol=1e-11, msg=key)
    after = nn.ModuleDict(modules).state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_names_of_blocks_are_prefixes_of_keys_and_occur_once() -> None:
    """Names with dots or slashes once lost tensors in exports and checkpoints."""
    for name in ("a.b", "a/b", "", "forward"):
        with pytest.raises(ModelError, match=f"block '{name}' of model mine: expected a name without"):
            Model.of("mine", {name: nn.Linear(2, 2)})
    with pytest.raises(ModelError, match="block 'a' of model mine: expected a name that occurs once"):
        Model("mine", (BlockSpec("a", nn.Tanh), BlockSpec("b", nn.Tanh), BlockSpec("a", nn.Tanh)))


def test_a_module_that_occurs_twice_stays_in_the_model() -> None:
    shared = nn.Tanh()
    layers = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared, nn.Linear(2, 2))
    x = torch.randn(3, 2)
    assert torch.equal(Model.of("mine", layers).build(0)(x), layers(x))
    with pytest.raises(ModelError, match=r"blocks of model mine: expected consecutive numbers .*, got 0, 1, 2, 4"):
        Model.of("mine", dict(layers.named_children()))


def test_weights_tied_between_blocks_are_refused() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    with pytest.raises(ModelError, match=r"block head of model mine: expected tensors of its own.* belongs to block embedding too"):
        Model.of("mine", {"embedding": embedding, "head": head})
    layer = nn.Linear(4, 4)
    model = Model("mine", (BlockSpec("a", lambda: layer), BlockSpec("b", lambda: layer)))
    with pytest.raises(ModelError, match="block a: expected a function that builds a new module at each call"):
        model.profile(TensorSpec((3, 4), torch.float32))


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    example = runpy.run_path(str(EXAMPLE))
    reversible = [isinstance(block.build(), example["Coupling"]) for block in example["network"]().blocks]
    assert reversible == [False, True, True, True, True, False, False]
    assert example["main"](epochs=1) > 0.2
    assert capsys.readouterr().out.startswith("epoch 1: loss ")
