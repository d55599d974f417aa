"""Strided 1x1 convolutions of narrow networks in channels-last format, where oneDNN's own gradient is wrong or crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from petra.models.layers import conv

torch.set_num_threads(1)
for channels, size in ((1, 8), (4, 8), (6, 32), (8, 56), (12, 96), (16, 16)):
    torch.manual_seed(0)
    layer = conv(channels, 2 * channels, 1, 2).to(memory_format=torch.channels_last)
    x = torch.randn(4, channels, size, size).to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(4):
        layer.weight.grad = x.grad = None
        y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        picked = x.detach()[..., ::2, ::2].double()
        weight = layer.weight.detach().double()[:, :, 0, 0]
        torch.testing.assert_close(y.double(), torch.einsum("nihw,oi->nohw", picked, weight), rtol=1e-4, atol=1e-5)
        expected = torch.einsum("nohw,nihw->oi", dy.double(), picked)
        assert (layer.weight.grad[:, :, 0, 0].double() - expected).norm() < 1e-5 * expected.norm(), (channels, size)
        dx = torch.zeros(x.shape, dtype=torch.float64)
        dx[..., ::2, ::2] = torch.einsum("nohw,oi->nihw", dy.double(), weight)
        torch.testing.assert_close(x.grad.double(), dx, rtol=1e-4, atol=1e-5)
print("correct")
"""


def test_gradients_of_narrow_strided_convolutions() -> None:
    """In processes of their own, because the error corrupts memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    started = [
        subprocess.Popen(command, env={**environment, "ONEDNN_MAX_CPU_ISA": isa}, stdout=subprocess.PIPE, text=True)
        for isa in ("AVX2", "DEFAULT")
    ]
    assert [(process.communicate()[0], process.returncode) for process in started] == [("correct\n", 0)] * 2
