"""Triton kernels: in Triton's interpreter against the plain operations, and compiled for GPUs that are not present."""

import importlib
import importlib.util
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from petra.inplace_abn import InPlaceABN, layer

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
without = interpreted or importlib.util.find_spec("triton") is None
compiles = pytest.mark.skipif(without, reason="Triton is not installed, or its interpreter, which compiles nothing, is active")
in_interpreter = pytest.mark.skipif(not interpreted, reason="run by test_in_the_interpreter")


@pytest.mark.processes
@compiles
def test_in_the_interpreter() -> None:
    """Run the other tests in a subprocess, since Triton reads the environment variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("petra.inplace_abn.kernels")
    monkeypatch.setattr(layer, "_kernels", lambda z: module if module.supports(z) else None)
    return module


@in_interpreter
@pytest.mark.parametrize(("slope", "training"), [(0.01, True), (0.01, False), (1, True)])
def test_equal_the_plain_operations(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, slope: float, training: bool) -> None:
    channels_last = slope < 1 and training
    shape = (3, 33, 5, 7) if channels_last else (40, 3, 6, 5)
    torch.manual_seed(0)
    called = []
    monkeypatch.setattr(kernels, "backward", lambda *a, run=kernels.backward: called.append(1) or run(*a))
    layer = InPlaceABN(shape[1], slope).double().train(training)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(shape[1]).sign() * (0.3 + torch.rand(shape[1])))
        layer.bias.normal_()
    x, delta = torch.randn(2, *shape, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    mean, var = (None, None) if training else (layer.running_mean.clone(), layer.running_var.clone())
    y = F.batch_norm(x, mean, var, layer.weight, layer.bias, training)
    z = F.leaky_relu(y, slope)
    wanted = [x, layer.weight, layer.bias]
    expected = torch.autograd.grad(z, wanted, delta)
    for a, b in zip(torch.autograd.grad(layer(x.clone()), wanted, delta), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert called


@in_interpreter
def test_bf16_with_statistics_in_float32(kernels: ModuleType) -> None:
    torch.manual_seed(1)
    layer, x = InPlaceABN(6), torch.randn(8, 6, 5, 5).bfloat16().requires_grad_()
    delta = torch.randn(8, 6, 5, 5).bfloat16()
    y = F.leaky_relu(F.batch_norm(x.float(), None, None, layer.weight, layer.bias, True), 0.01)
    wanted = [x, layer.weight, layer.bias]
    expected = torch.autograd.grad(y, wanted, delta.float())
    for a, b in zip(torch.autograd.grad(layer(x.clone()), wanted, delta), expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
FLOATS = {"float32": "fp32", "bfloat16": "bf16"}
CONSTANTS = ("SLOPE", "DTYPE", "BLOCK_C", "BLOCK_R")
IN_INPUT_TYPE = ("dz_pointer", "z_pointer", "dx_pointer")


def compiled(kernel: Any, architecture: int, float_name: str, tile: tuple[int, int]) -> Any:
    """Compile a kernel as for a channels-last (tile 32 x 32) or a contiguous tensor (tile 1 x 1024)."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", architecture, 32)
    values = (0.01, importlib.import_module("triton.language").float32, *tile)
    constants: dict[str, Any] = dict(zip(CONSTANTS, values, strict=True))
    constants["channel_stride" if tile[0] > 1 else "position_stride"] = 1  # Triton compiles arguments that are 1 as constants
    names = [p.name for p in kernel.params]
    signature = {}
    for name in names:
        pointer = f"*{FLOATS[float_name]}" if name in IN_INPUT_TYPE else "*fp32"
        signature[name] = "constexpr" if name in constants else pointer if name.endswith("pointer") else "i32"
    source = compiler.ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return compiler.compile(source, target=target)


@compiles
@pytest.mark.parametrize(
    ("architecture", "float_name", "tile"),
    [("sm_80", "float32", (1, 1024)), ("sm_90", "bfloat16", (32, 32)), ("sm_100", "bfloat16", (32, 32))],
)
@pytest.mark.parametrize("name", ["_sums_kernel", "_input_gradient_kernel"])
def test_kernels_compile_to_machine_code(name: str, architecture: str, float_name: str, tile: tuple[int, int]) -> None:
    kernels = importlib.import_module("petra.inplace_abn.kernels")
    found = compiled(getattr(kernels, name), ARCHITECTURES[architecture], float_name, tile)
    assert found.asm["cubin"][:4] == b"\x7fELF"
    assert f".target {architecture}" in found.asm["ptx"]
    assert found.metadata.shared <= 2**10
    assert ".local" not in found.asm["ptx"]  # nothing is stored outside registers and shared memory
