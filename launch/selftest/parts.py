"""Parts of the self-test. Each runs in processes of its own: ``petra selftest.parts NAME OPTIONS OUT``.

OPTIONS are JSON. The first process writes its findings to OUT, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra import METHODS, Numerics, Pipeline, Recipe, Runtime, TensorSpec
from petra.cost_model.memory import predict_memory
from petra.diagnostics.process_memory import peak_memory, release_memory
from petra.distributed import all_gather_objects
from petra.models import MODELS
from petra.training import sgd

from ..run.build import type_of
from ..runtime.agent import this_process
from ..runtime.rank import Process

Options = dict[str, Any]
"""Options of a part: those of :func:`build`, and ``microbatches``, ``device``, ``timeout`` and ``least_bytes``."""


class RandomData:
    """Microbatches that depend on their number only. Four inputs are made in advance, so that making them takes no time."""

    def __init__(self, inputs: TensorSpec, classes: int) -> None:
        self._classes, tokens = classes, not inputs.dtype.is_floating_point
        self.targets_spec = TensorSpec((inputs.shape[0] * (inputs.shape[1] if tokens else 1),), torch.int64)
        generator = torch.Generator().manual_seed(0)
        self._made = [
            torch.randint(classes, inputs.shape, generator=generator) if tokens else torch.randn(inputs.shape, generator=generator)
            for _ in range(4)
        ]

    def inputs(self, m: int) -> Tensor:
        """Return one of the inputs."""
        return self._made[m % 4]

    def targets(self, m: int) -> Tensor:
        """Return random classes."""
        return torch.randint(self._classes, self.targets_spec.shape, generator=torch.Generator().manual_seed(m))


def build(options: Options, device: torch.device) -> tuple[Pipeline, RandomData]:
    """Build a pipeline and its data.

    Args:
        options: ``model``, ``batch``, ``method``, ``k``, and optionally ``width``, ``size``, ``stages``, ``delay``, ``transport``,
            ``precision``, ``channels_last`` and ``compile``.
    """
    method = METHODS[options["method"]]
    if "delay" in options:
        method = replace(method, delay=options["delay"])
    if options["model"] == "revgpt":
        classes, size = 256, options.get("size", 256)
        model = MODELS["revgpt"](classes, dim=options.get("dim", 512), depth=options.get("depth", 8), heads=8, size=size)
        inputs = TensorSpec((options["batch"], size), torch.int64)
    else:
        classes, size = 10, options.get("size", 32)
        model = MODELS[options["model"]](classes, width=options.get("width", 1.0))
        inputs = TensorSpec((options["batch"], 3, size, size), torch.float32)
    pipeline = Pipeline(
        model,
        inputs,
        Recipe(sgd, lambda t: 0.01),
        method=method,
        k=options["k"],
        stages=options.get("stages"),
        numerics=Numerics(type_of(options.get("precision", "float32")), options.get("channels_last", False)),
        runtime=Runtime(device, options.get("transport", "auto"), compile=options.get("compile")),
    )
    return pipeline, RandomData(inputs, classes)


def weights(options: Options, device: torch.device) -> dict[str, Tensor]:
    """Train for three updates and return the weights of this process, on the CPU."""
    pipeline, data = build(options, device)
    pipeline.train(data, 3 * options["k"])
    return {key: value.detach().to("cpu", copy=True) for key, value in pipeline.state_dict().items()}


def compare_with_cpu(options: Options, device: torch.device, process: Process) -> dict[str, Any]:
    """Train on the device twice and on the CPU once, in one process. Return differences of weights."""
    first, second, cpu = (weights(options, d) for d in (device, device, torch.device("cpu")))
    difference = max(float((first[k].double() - v.double()).abs().max() / (v.double().abs().max() + 1e-12)) for k, v in cpu.items())
    return {"difference": difference, "repeatable": all(torch.equal(first[k], v) for k, v in second.items())}


def train_in_processes(options: Options, device: torch.device, process: Process) -> dict[str, Any]:
    """Train over a transport twice. Return the size of a message, the loss, the seconds per microbatch, and digests of the weights.

    The first run includes what happens once, such as loading kernels; the second one is timed.
    """
    digests = []
    for _ in range(2):
        release_memory(device)
        pipeline, data = build(options, device)
        started = time.perf_counter()
        result = pipeline.train(data, options["microbatches"])
        seconds = (time.perf_counter() - started) / options["microbatches"]
        digests.append(_digest(pipeline))
        plan = pipeline.plan
        del pipeline
    largest = max((boundary.backward_bytes for boundary in plan.boundaries), default=0)
    found = {"transport": plan.transport, "message_bytes": largest, "loss": result.loss, "seconds_per_microbatch": seconds}
    return {**found, "digest": digests[0], "repeatable": digests[0] == digests[1]}


def _digest(pipeline: Pipeline) -> str:
    """Return the beginning of a digest of all weights. Every process must call this function."""
    own = hashlib.sha256()
    for value in pipeline.state_dict().values():
        own.update(value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashlib.sha256("".join(all_gather_objects(own.hexdigest())).encode()).hexdigest()[:12]


def measure_speed(options: Options, device: torch.device, process: Process) -> dict[str, Any]:
    """Return the throughput after a warm-up, the largest peak memory of a process, and the largest prediction without workspaces.

    On a GPU, also return torch's profile of one process, and how much of the peak was predicted. The memory of a CPU is resident.
    """
    release_memory(device)
    pipeline, data = build(options, device)
    pipeline.train(data, options["microbatches"])
    started = time.perf_counter()
    result = pipeline.train(data, options["microbatches"])
    seconds = time.perf_counter() - started
    peak = max(all_gather_objects(peak_memory(device)))
    predicted = max(memory.tensors for memory in predict_memory(pipeline.plan, pipeline.recipe, data.targets_spec))
    found = {"samples_per_second": options["batch"] * options["microbatches"] / seconds, "loss": result.loss}
    found |= {"peak_bytes": peak, "predicted_bytes": predicted}
    if device.type == "cuda":
        found["predicted_over_peak"] = predicted / peak
    if torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities():  # type: ignore[no-untyped-call]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            pipeline.train(data, options["microbatches"])
        found["profile"] = profile.key_averages().table("self_device_time_total", row_limit=12)
    return found


PARTS: dict[str, Callable[[Options, torch.device, Process], dict[str, Any]]] = {
    "compare": compare_with_cpu,
    "transport": train_in_processes,
    "speed": measure_speed,
}
"""Parts by name: functions of their options, a device and this process that return findings."""


def main() -> None:
    """Run the part that the arguments name in this process."""
    name, options, out = sys.argv[1:]
    given = json.loads(options)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True  # as in training by default
    with this_process() as process:
        device = process.device(given.get("device", "auto"))
        with process.process_group(device, given.get("timeout", 60)):
            found = PARTS[name](given, device, process)
    if process.first:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
