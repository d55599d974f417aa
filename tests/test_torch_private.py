"""Private names of torch: only one file uses them, and what replaces them in a torch without them gives the same results."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from petra import PetraError, torch_private
from tests.structure import ROOT, modules

PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._[a-z]\w*|from torch[\w.]* import .*\b_[a-z]\w*|from torch[\w.]*\._[a-z]"
    r"|\._(?:version|backward_hooks|post_accumulate_grad_hooks|cdata|conv_forward|get_backend|timeout)\b|\b_NormBase\b"
)


def test_only_one_file_uses_private_names_of_torch() -> None:
    found = {name: PRIVATE.findall(path.read_text(encoding="utf-8")) for name, path in modules(ROOT).items()}
    assert {name for name, uses in found.items() if uses} == {"petra.torch_private"}


@pytest.mark.parametrize("engine", [True, False])
def test_differentiation_of_some_outputs(monkeypatch: pytest.MonkeyPatch, engine: bool) -> None:
    """Autograd's engine and the public function return the same gradients, and None for an input that was not used."""
    x, w, unused = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    outputs, gradients = (x @ w, w.sin()), (torch.randn(3, 3), torch.randn(3, 3))
    expected = torch.autograd.grad(outputs, [x, w], gradients, retain_graph=True)
    if not engine:
        monkeypatch.setattr(torch_private, "autograd_engine", None)
    *found, none = torch_private.vector_jacobian_products(outputs, [x, w, unused], gradients)
    assert none is None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_with_other_weights(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    conv, x = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", bias=bias), torch.randn(1, 2, 5, 5)
    weight, offset = torch.randn_like(conv.weight), torch.randn(3) if bias else None
    expected = torch_private.conv_forward(conv, x, weight, offset)
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", None)

    class Public(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            padded = nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
            return nn.functional.conv2d(padded, self.weight, self.bias)

    public = Public(2, 3, 3, bias=bias)
    assert torch.equal(torch_private.conv_forward(public, x, weight, offset), expected)


def test_the_base_of_normalisations_is_found_by_its_constants() -> None:
    assert torch_private.NormBase is nn.modules.batchnorm._NormBase


def test_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd, "_unsafe_preserve_version_counter")
    with pytest.raises(PetraError, match=r"use method\.keep=input"):
        torch_private.preserve_version_counter(())
    monkeypatch.setattr(dist, "group", type("Group", (), {"WORLD": None}))
    assert torch_private.default_group_timeout(torch.device("cpu")) == timedelta(minutes=30)
    assert torch_private.default_store() is None
    monkeypatch.setattr(torch, "_dynamo", None)
    torch_private.set_recompile_limit(3)


def test_versions_grow_with_writes() -> None:
    x = torch.zeros(2)
    before = torch_private.version(x)
    x += 1
    assert torch_private.version(x) != before
    with torch.inference_mode():
        assert torch_private.version(torch.zeros(2)) is None
