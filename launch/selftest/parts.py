"""Parts of the self-test. Each runs in processes of its own: ``petra selftest.parts NAME OPTIONS OUT``.

OPTIONS are JSON. The first process writes its findings to OUT, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra import METHODS, Numerics, Pipeline, Runtime, TensorSpec
from petra.distributed import all_gather_objects
from petra.models import MODELS
from petra.process_memory import peak_memory, release_memory
from petra.training import sgd

from ..run.build import PRECISIONS
from ..runtime.rank import Process
from ..runtime.reporting import report_errors


class RandomData:
    """Microbatches that depend on their number only."""

    def __init__(self, inputs: TensorSpec, classes: int) -> None:
        self._inputs, self._classes = inputs, classes
        tokens = not inputs.dtype.is_floating_point
        self._targets = inputs.shape[0] * (inputs.shape[1] if tokens else 1)
        generator = torch.Generator().manual_seed(0)
        if tokens:
            self._made = [torch.randint(classes, inputs.shape, generator=generator) for _ in range(4)]
        else:
            self._made = [torch.randn(inputs.shape, generator=generator) for _ in range(4)]

    def inputs(self, m: int) -> Tensor:
        """Return one of four inputs that were made in advance, so that making them takes no time."""
        return self._made[m % 4]

    def targets(self, m: int) -> Tensor:
        """Return random classes."""
        return torch.randint(self._classes, (self._targets,), generator=torch.Generator().manual_seed(m))


def build(options: dict[str, Any], device: torch.device) -> tuple[Pipeline, RandomData]:
    """Build a pipeline and its data.

    Args:
        options: ``model``, ``batch``, ``method``, ``k``, and optionally ``width``, ``size``, ``delay``, ``transport``,
            ``precision``, ``channels_last`` and ``compile``.
    """
    method = METHODS[options["method"]]
    if "delay" in options:
        method = replace(method, delay=options["delay"])
    if options["model"] == "revgpt":
        size = options.get("size", 256)
        model = MODELS["revgpt"](256, dim=options.get("dim", 512), depth=options.get("depth", 8), heads=8, size=size)
        inputs, classes = TensorSpec((options["batch"], size), torch.int64), 256
    else:
        model, classes = MODELS[options["model"]](10, width=options.get("width", 1.0)), 10
        size = options.get("size", 32)
        inputs = TensorSpec((options["batch"], 3, size, size), torch.float32)
    pipeline = Pipeline(
        model,
        inputs,
        method=method,
        k=options["k"],
        optimizer=sgd,
        learning_rate=lambda t: 0.01,
        numerics=Numerics(PRECISIONS[options.get("precision", "float32")], options.get("channels_last", False)),
        runtime=Runtime(device, options.get("transport", "auto"), compile=options.get("compile")),
    )
    return pipeline, RandomData(inputs, classes)


def weights(options: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Train for three updates and return the weights of this process, on the CPU."""
    pipeline, data = build(options, device)
    pipeline.train(data, 3 * options["k"])
    return {key: value.detach().to("cpu", copy=True) for key, value in pipeline.state_dict().items()}


def compare_with_cpu(options: dict[str, Any], device: torch.device, process: Process) -> dict[str, Any]:
    """Train on the device twice and on the CPU once, in one process. Return differences of weights."""
    torch.backends.cudnn.allow_tf32 = False
    first, second, cpu = (weights(options, d) for d in (device, device, torch.device("cpu")))
    difference = max(float((first[k].double() - v.double()).abs().max() / (v.double().abs().max() + 1e-12)) for k, v in cpu.items())
    return {"difference": difference, "repeatable": all(torch.equal(first[k], v) for k, v in second.items())}


def train_in_processes(options: dict[str, Any], device: torch.device, process: Process) -> dict[str, Any]:
    """Train over a transport. Return the size of a message, the loss and the seconds per microbatch."""
    pipeline, data = build(options, device)
    started = time.perf_counter()
    result = pipeline.train(data, options["microbatches"])
    seconds = (time.perf_counter() - started) / options["microbatches"]
    boundaries = pipeline.plan.boundaries
    largest = max((b.backward_bytes for b in boundaries), default=0)
    return {"transport": pipeline.plan.transport, "message_bytes": largest, "loss": result.loss, "seconds": seconds}


def measure_speed(options: dict[str, Any], device: torch.device, process: Process) -> dict[str, Any]:
    """Return the throughput after a warm-up, the peak memory of each process, and how kernels keep the GPU busy."""
    release_memory(device)
    pipeline, data = build(options, device)
    pipeline.train(data, options["microbatches"])
    started = time.perf_counter()
    result = pipeline.train(data, options["microbatches"])
    seconds = time.perf_counter() - started
    found = {"samples_per_second": options["batch"] * options["microbatches"] / seconds, "loss": result.loss}
    found["peak_bytes"] = all_gather_objects(peak_memory(device))
    if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
        found |= _kernels(pipeline, data, options["microbatches"])
    return found


def _kernels(pipeline: Pipeline, data: RandomData, microbatches: int) -> dict[str, float]:
    """Return the number of kernels per microbatch, and the fraction of the time in which one runs."""
    started = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        pipeline.train(data, microbatches)
        seconds = time.perf_counter() - started
    rows = profile.key_averages()
    kernels = sum(row.count for row in rows)
    busy = sum(row.self_device_time_total for row in rows) * 1e-6
    return {"kernels_per_microbatch": kernels / microbatches, "device_busy": busy / seconds}


PARTS: dict[str, Callable[[dict[str, Any], torch.device, Process], dict[str, Any]]] = {
    "compare": compare_with_cpu,
    "transport": train_in_processes,
    "speed": measure_speed,
}
"""Parts by name."""


def main() -> None:
    """Run the part that the arguments name in this process."""
    name, options, out = sys.argv[1:]
    process = Process.from_environment()
    given = json.loads(options)
    torch.set_num_threads(1)
    with report_errors(process):
        device = process.device(given.get("device", "auto"))
        with process.process_group(device, given.get("timeout", 60)):
            found = PARTS[name](given, device, process)
    if process.first:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
