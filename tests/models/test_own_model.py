"""Models of existing modules, and the example of docs/own_model.md."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from petra import Model, Pipeline
from tests.support.nets import RandomSource, mixed_net

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"


def test_a_model_of_existing_modules_trains_copies_of_them() -> None:
    modules = dict(mixed_net().build(5).named_children())
    before = {key: value.clone() for key, value in nn.ModuleDict(modules).state_dict().items()}
    model, data = Model.of("mine", modules), RandomSource()
    profile = model.profile(data.spec)
    assert [block.reversible for block in profile] == [False, True, False, True, True, False]
    pipeline = Pipeline(model, data.spec, method="reversible", optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), seed=8)
    pipeline.train(data, 1)

    plain = mixed_net().build(5)
    F.cross_entropy(plain(data.inputs(0)), data.targets(0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for key, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-9, atol=1e-11, msg=key)
    after = nn.ModuleDict(modules).state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    example = runpy.run_path(str(EXAMPLE))
    reversible = [isinstance(block.build(), example["Coupling"]) for block in example["network"]().blocks]
    assert reversible == [False, True, True, True, True, False, False]
    assert example["main"](epochs=1) > 0.2
    assert capsys.readouterr().out.startswith("epoch 1: loss ")
