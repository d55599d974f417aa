"""Parts of the self-test. Each runs in processes of its own: ``petra selftest.parts NAME OPTIONS OUT``.

OPTIONS are JSON. The first process writes its findings to OUT, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from petra import METHODS, Numerics, Pipeline, Recipe, Runtime, TensorSpec
from petra.cost_model.memory import predict_memory
from petra.distributed import all_gather_objects
from petra.models import MODELS
from petra.process_memory import peak_memory, release_memory
from petra.training import sgd

from ..run.build import type_of
from ..runtime.agent import this_process
from ..runtime.rank import Process

SHARES = ("kernels_per_microbatch", "device_busy", "communication", "launching")
"""What the profiler measures."""
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
"""Beginnings of the names of CUDA functions that start work on the GPU."""


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


def build(options: dict[str, Any], device: torch.device) -> tuple[Pipeline, RandomData]:
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


def weights(options: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Train for three updates and return the weights of this process, on the CPU."""
    pipeline, data = build(options, device)
    pipeline.train(data, 3 * options["k"])
    return {key: value.detach().to("cpu", copy=True) for key, value in pipeline.state_dict().items()}


def compare_with_cpu(options: dict[str, Any], device: torch.device, process: Process) -> dict[str, Any]:
    """Train on the device twice and on the CPU once, in one process. Return differences of weights."""
    first, second, cpu = (weights(options, d) for d in (device, device, torch.device("cpu")))
    difference = max(float((first[k].double() - v.double()).abs().max() / (v.double().abs().max() + 1e-12)) for k, v in cpu.items())
    return {"difference": difference, "repeatable": all(torch.equal(first[k], v) for k, v in second.items())}


def train_in_processes(options: dict[str, Any], device: torch.device, process: Process) -> dict[str, Any]:
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


def compare_memory(options: dict[str, Any], device: torch.device, process: Process) -> dict[str, Any]:
    """Train, and return the peak of the allocator and the prediction of this process, without workspaces."""
    release_memory(device)
    pipeline, data = build(options, device)
    pipeline.train(data, max(pipeline.plan.delays) + 2 * options["k"] + 2)
    peak = peak_memory(device) if device.type == "cuda" else None
    predicted = predict_memory(pipeline.plan, pipeline.recipe, data.targets_spec)[0]
    ratio = predicted.tensors / peak if peak else None
    return {"peak_bytes": peak, "predicted_bytes": predicted.tensors, "predicted_over_peak": ratio}


def measure_speed(options: dict[str, Any], device: torch.device, process: Process) -> dict[str, Any]:
    """Return the throughput after a warm-up, the peak memory of each process, and what the GPU and its host did meanwhile."""
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
    """Train under the profiler, and return :func:`shares`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        started = time.perf_counter()
        pipeline.train(data, microbatches)
        seconds = time.perf_counter() - started
    return shares(profile.key_averages(), seconds, microbatches)


def shares(rows: Iterable[Any], seconds: float, microbatches: int) -> dict[str, float]:
    """Return the kernels per microbatch, and fractions of the time: of kernels, of NCCL's kernels, and of launches by the host.

    Args:
        rows: Averages of the profiler. Those of the GPU are kernels and copies, those of the CPU are calls of CUDA.
        seconds: Duration of the training.
        microbatches: Number of its microbatches.
    """
    found = dict.fromkeys(SHARES, 0.0)
    for row in rows:
        if row.device_type == torch.profiler.DeviceType.CUDA:
            part = "communication" if row.key.startswith("nccl") else "device_busy"
            found[part] += row.self_device_time_total * 1e-6 / seconds
            found["kernels_per_microbatch"] += row.count / microbatches
        elif row.key.startswith(LAUNCHES):
            found["launching"] += row.self_cpu_time_total * 1e-6 / seconds
    return found


class Part(NamedTuple):
    """A kind of part.

    Attributes:
        title: Title of its table in the report.
        explanation: What the columns of the table mean.
        columns: Findings that are columns of the table, between the name of the run and its result.
        run: Runs it with its options, on a device, in this process. Returns its findings.
    """

    title: str
    explanation: str
    columns: tuple[str, ...]
    run: Callable[[dict[str, Any], torch.device, Process], dict[str, Any]]


PARTS = {
    "compare": Part(
        "Methods against the CPU",
        "Largest difference of weights after three updates in float32, relative to the largest weight of a tensor, in one "
        "process. Rounding differs between devices, so 1e-3 is accepted.",
        ("difference", "repeatable"),
        compare_with_cpu,
    ),
    "transport": Part(
        "Transports",
        "Training in several processes, twice. The digest is of all weights: it is equal for runs with the same d.",
        ("processes", "message_bytes", "seconds_per_microbatch", "loss", "digest", "repeatable"),
        train_in_processes,
    ),
    "memory": Part(
        "Memory",
        "Peak of torch's allocator in one process with four stages, and `dry_run=memory` without workspaces. The peak of a CPU is "
        "not known.",
        ("peak_bytes", "predicted_bytes", "predicted_over_peak"),
        compare_memory,
    ),
    "speed": Part(
        "Throughput",
        "k = 4. Samples are images, or windows of tokens for revgpt. Peak memory is the largest of all processes: of torch's "
        "allocator on GPUs, resident memory on CPUs. The last columns are of the first process, as fractions of the time: kernels "
        "of the GPU besides NCCL's, NCCL's kernels (with waiting for other processes), and calls of the host that launch kernels. "
        "Much time in launches means that the GPU waits for Python. These columns are empty without a GPU.",
        ("processes", "samples_per_second", "peak_bytes", *SHARES),
        measure_speed,
    ),
}
"""Parts by name."""


def main() -> None:
    """Run the part that the arguments name in this process."""
    name, options, out = sys.argv[1:]
    given = json.loads(options)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True  # as in training by default
    with this_process() as process:
        device = process.device(given.get("device", "auto"))
        with process.process_group(device, given.get("timeout", 60)):
            found = PARTS[name].run(given, device, process)
    if process.first:
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
