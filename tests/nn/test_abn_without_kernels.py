"""InPlaceABN on a machine where Triton is installed but can't compile its kernels."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from petra.nn import inplace_abn


def test_plain_operations_replace_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    fake = SimpleNamespace(trial=fails, supports=lambda z: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    inplace_abn._compiled_kernels.cache_clear()
    z: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="Triton can't compile its kernels .RuntimeError: Failed to find C compiler"):
        assert inplace_abn._kernels(z) is None
    assert inplace_abn._kernels(z) is None  # one warning
    fake.trial = lambda device: None
    inplace_abn._compiled_kernels.cache_clear()
    assert inplace_abn._kernels(z) is fake
    inplace_abn._compiled_kernels.cache_clear()
