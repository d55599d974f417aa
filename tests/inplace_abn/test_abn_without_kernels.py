"""InPlaceABN on a machine where Triton is installed but can't compile its kernels."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from petra.inplace_abn import layer


def test_plain_operations_replace_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    fake = SimpleNamespace(trial=fails, supports=lambda z: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    layer._compiled_kernels.cache_clear()
    z: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    with pytest.warns(UserWarning, match="Triton can't compile its kernels .RuntimeError: Failed to find C compiler"):
        assert layer._kernels(z) is None
    assert layer._kernels(z) is None  # one warning
    fake.trial = lambda device: None
    layer._compiled_kernels.cache_clear()
    assert layer._kernels(z) is fake
    layer._compiled_kernels.cache_clear()
