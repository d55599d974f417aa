"""Imported first in the process from which those of :mod:`tests.emulated.processes` are forked: device, torch and petra."""

import gc
import importlib

from tests.emulated import device

device.install(device.Options(devices=8))

import torch  # noqa: E402 (after the device)

torch.set_num_threads(1)
for name in (
    *("torch._dynamo", "matplotlib.figure", "pytest", "petra", "petra.models", "petra.training"),
    *("petra.diagnostics.recorder", "launch.train"),
):
    importlib.import_module(name)
gc.freeze()
