"""Private names of torch: only one file uses them, and they give the results of public functions."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from petra import torch_private
from tests.structure import ROOT, modules

PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._[a-z]\w*|from torch[\w.]* import .*\b_[a-z]\w*|from torch[\w.]*\._[a-z]"
    r"|\._(?:version|backward_hooks|post_accumulate_grad_hooks|cdata|conv_forward|get_backend|timeout)\b|\b_NormBase\b"
)


def test_only_one_file_uses_private_names_of_torch() -> None:
    found = {name: PRIVATE.findall(path.read_text(encoding="utf-8")) for name, path in modules(ROOT).items()}
    assert {name for name, uses in found.items() if uses} == {"petra.torch_private"}


def test_differentiation_of_some_outputs() -> None:
    """Autograd's engine returns the gradients of the public function, and None for an input that was not used."""
    x, w, unused = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    outputs, gradients = (x @ w, w.sin()), (torch.randn(3, 3), torch.randn(3, 3))
    expected = torch.autograd.grad(outputs, [x, w], gradients, retain_graph=True)
    *found, none = torch_private.vector_jacobian_products(outputs, [x, w, unused], gradients)
    assert none is None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_with_other_weights(bias: bool) -> None:
    conv, x = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect", bias=bias), torch.randn(1, 2, 5, 5)
    weight, offset = torch.randn_like(conv.weight), torch.randn(3) if bias else None
    parameters = {"weight": weight} if offset is None else {"weight": weight, "bias": offset}
    expected = torch.func.functional_call(conv, parameters, x)
    assert torch.equal(torch_private.conv_forward(conv, x, weight, offset), expected)


def test_versions_grow_with_writes() -> None:
    x = torch.zeros(2)
    before = torch_private.version(x)
    x += 1
    assert torch_private.version(x) != before
    with torch.inference_mode():
        assert torch_private.version(torch.zeros(2)) is None
