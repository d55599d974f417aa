"""Triton kernels compiled to machine code for GPUs that are not present, and the limits of their grids."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
FLOATS = {"float32": "fp32", "bfloat16": "bf16"}
CONSTANTS = ("ACTIVATION", "SLOPE", "SMALLEST", "DTYPE", "BLOCK_C", "BLOCK_R")
IN_INPUT_TYPE = ("dz_pointer", "z_pointer", "dx_pointer")


def compiled(kernel: Any, architecture: int, float_name: str, tile: tuple[int, int]) -> Any:
    """Compile a kernel as for a channels-last (tile 32 x 32) or a contiguous tensor (tile 1 x 1024)."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", architecture, 32)
    values = ("leaky_relu", 0.01, -1 + 1e-7, triton.language.float32, *tile)
    constants: dict[str, Any] = dict(zip(CONSTANTS, values, strict=True))
    constants["channel_stride" if tile[0] > 1 else "position_stride"] = 1  # Triton compiles arguments that are 1 as constants
    names = [p.name for p in kernel.params]
    signature = {}
    for name in names:
        pointer = f"*{FLOATS[float_name]}" if name in IN_INPUT_TYPE else "*fp32"
        signature[name] = "constexpr" if name in constants else pointer if name.endswith("pointer") else "i32"
    source = compiler.ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return compiler.compile(source, target=target)


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


@pytest.mark.parametrize("shape", [(64, 128, 112, 112), (168, 128, 112, 112), (1024, 64, 112, 112), (4096, 64, 32, 32)])
def test_grids_are_within_the_limits_of_cuda(shape: tuple[int, ...]) -> None:
    kernels = importlib.import_module("petra.inplace_abn.kernels")
    for memory_format in (torch.contiguous_format, torch.channels_last):
        z = torch.empty(shape, device="meta", memory_format=memory_format)
        rows, channels = kernels.input_gradient_grid(z)
        assert rows <= 2**31 - 1
        assert channels <= 65_535
        assert kernels.supports(z)
    assert not kernels.supports(torch.empty((1, 70_000, 2), device="meta"))
