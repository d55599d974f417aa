"""Parts of the self-test: functions of their options, the device and this process that return findings."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from petra import METHODS, Numerics, Pipeline, Recipe, Runtime, TensorSpec
from petra.cost_model.memory import predict_memory
from petra.diagnostics.process_memory import peak_memory, release_memory
from petra.distributed import all_gather_objects
from petra.engine.options.compile import WarmUp
from petra.engine.options.watchdog import Watchdog
from petra.inplace_abn import InPlaceABN
from petra.models import MODELS
from petra.reversible import Coupling
from petra.training import Checkpoints, restore, sgd
from petra.training.weight_files import hash_of

from ..bench.contestants import Batches
from ..doctor.command import report_text
from ..doctor.links import measure_links
from ..doctor.machine import find_differences, inspect_machine
from ..run.build import type_of
from ..runtime.rank import Process

Options = dict[str, Any]
"""Options of a part: those of :func:`build`, ``microbatches``, ``folder``, ``bytes``, and what its findings are compared with."""
Findings = dict[str, Any]


class Copies(Batches):
    """Microbatches that have their samples several times, one copy after the other: one for each replica."""

    def __init__(self, inputs: TensorSpec, k: int, classes: int, copies: int) -> None:
        super().__init__(replace(inputs, shape=(inputs.shape[0] // copies, *inputs.shape[1:])), k, classes)
        self.x, self.y = (torch.cat([t] * copies, 1) for t in (self.x, self.y))
        self.targets_spec = TensorSpec((*self.y.shape[1:],), torch.int64)


def build(options: Options, device: torch.device) -> tuple[Pipeline, Copies]:
    """Build a pipeline with a watchdog, and its data.

    Args:
        options: ``model``, ``batch`` (of each replica), ``method``, ``k``, and optionally ``width``, ``size``, ``dim``, ``depth``,
            ``stages``, ``dp``, ``delay``, ``transport``, ``precision``, ``channels_last``, ``compile``, ``timeout``
            and ``patience``: seconds until the watchdog reports.
    """
    method, dp = METHODS[options["method"]], options.get("dp", 1)
    if "delay" in options:
        method = replace(method, delay=options["delay"])
    if options["model"] == "revgpt":
        classes, size = 256, options.get("size", 256)
        model = MODELS["revgpt"](classes, dim=options.get("dim", 512), depth=options.get("depth", 8), heads=8, size=size)
        inputs = TensorSpec((dp * options["batch"], size), torch.int64)
    else:
        classes, size = 10, options.get("size", 32)
        model = MODELS[options["model"]](classes, width=options.get("width", 1.0))
        inputs = TensorSpec((dp * options["batch"], 3, size, size), torch.float32)
    pipeline = Pipeline(
        model,
        inputs,
        Recipe(sgd, lambda t: 0.01),
        method=method,
        k=options["k"],
        stages=options.get("stages"),
        dp=dp,
        numerics=Numerics(type_of(options.get("precision", "float32")), options.get("channels_last", False)),
        runtime=Runtime(device, options.get("transport", "auto"), compile=options.get("compile")),
    )
    quiet = 1
    if options.get("compile") is not None:
        quiet = 2 * len(pipeline.plan.stages) + 2
        pipeline.hooks.append(WarmUp(pipeline.plan, pipeline.stages, pipeline.device))
    patience = options.get("patience", 20.0)
    pipeline.hooks.append(Watchdog(pipeline.workers, pipeline.rank, patience, quiet=quiet, timeout=options.get("timeout", inf)))
    return pipeline, Copies(inputs, 4, classes, dp)


def inspect(options: Options, device: torch.device, process: Process) -> Findings:
    """Return the report of ``petra doctor`` on all machines of the group."""
    reports = all_gather_objects(inspect_machine(process, device))
    links = measure_links(device) if process.world > 1 else {}
    return {"report": report_text(reports, links, find_differences(reports, process.world))}


def exchange(options: Options, device: torch.device, process: Process) -> Findings:
    """Return whether messages and sums arrive with torch.distributed alone: large messages to both neighbours, and all-reduces."""
    own, rank, world = torch.full((options["bytes"] // 4,), float(process.rank), device=device), process.rank, process.world
    total, neighbours = own.clone(), ((rank - 1) % world, (rank + 1) % world)
    dist.all_reduce(total)
    received = [torch.empty_like(own) for _ in neighbours]
    operations = [dist.P2POp(dist.isend, own, peer) for peer in neighbours]
    operations += [dist.P2POp(dist.irecv, buffer, peer) for buffer, peer in zip(received, neighbours, strict=True)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expected = (world * (world - 1) / 2, *neighbours)
    equal = all(bool((found == value).all()) for found, value in zip((total, *received), expected, strict=True))
    return {"equal": all(all_gather_objects(equal))}


def compare_blocks(options: Options, device: torch.device, process: Process) -> Findings:
    """Compare a reversible block and InPlace-ABN with plain operations: outputs and gradients. Return the largest difference."""
    torch.manual_seed(0)
    x, dy = (torch.randn(4, 8, 16, 16).to(device) for _ in range(2))
    layer, plain = InPlaceABN(8).to(device), torch.nn.BatchNorm2d(8).to(device)
    own, other = (x.clone().requires_grad_() for _ in range(2))
    z, y = layer(own * 1.0), F.leaky_relu(plain(other), layer.slope)
    found = [z, *torch.autograd.grad(z, [own, *layer.parameters()], dy)]
    expected = [y, *torch.autograd.grad(y, [other, *plain.parameters()], dy)]
    block = Coupling(torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1, bias=False), torch.nn.BatchNorm2d(8))).to(device)
    streams, gradients = (x.requires_grad_(), dy.clone().requires_grad_()), (dy, x.detach())
    outputs = block(*streams)
    expected += [*streams, *torch.autograd.grad(outputs, [*streams, *block.parameters()], gradients)]
    with torch.no_grad():
        inputs, dx, others = block.inverse_vjp(tuple(t.detach() for t in outputs), gradients)
    found += [*inputs, *dx, *(others[p] for p in block.parameters())]
    return {"difference": max(_difference(a, b) for a, b in zip(found, expected, strict=True))}


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest value of ``b``."""
    a, b = a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
    return float((a - b).abs().max() / (b.abs().max() + 1e-12))


def weights(options: Options, device: torch.device) -> dict[str, Tensor]:
    """Train for three updates and return the weights of this process, on the CPU."""
    pipeline, data = build(options, device)
    pipeline.train(data, 3 * options["k"])
    return {key: value.detach().to("cpu", copy=True) for key, value in pipeline.state_dict().items()}


def compare_with_cpu(options: Options, device: torch.device, process: Process) -> Findings:
    """Train on the device twice and on the CPU once, not compiled. Return differences of weights."""
    first, second = (weights(options, device) for _ in range(2))
    cpu = weights({**options, "compile": None}, torch.device("cpu"))
    difference = max(_difference(first[key], value) for key, value in cpu.items())
    return {"difference": difference, "repeatable": all(torch.equal(first[k], v) for k, v in second.items())}


def train(options: Options, device: torch.device, process: Process) -> Findings:
    """Train twice. Return the size of a message, the loss, the seconds per microbatch, and the digest of all weights.

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
    found = {"transport": plan.transport, "largest_message_bytes": largest, "training_loss": result.loss}
    found["seconds_per_new_microbatch"] = seconds
    return {**found, "digest": digests[0], "repeatable": digests[0] == digests[1]}


def _digest(pipeline: Pipeline) -> str:
    """Return the beginning of a digest of all weights, for any number of processes. Every process must call this function."""
    own = {key: hash_of({key: value}) for key, value in pipeline.state_dict().items()}
    found = {key: digest for part in all_gather_objects(own) for key, digest in part.items()}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


def resume(options: Options, device: torch.device, process: Process) -> Findings:
    """Save a checkpoint in the background, train on, and return whether a pipeline that resumes from it has the same weights.

    Return None instead if not all processes see the folder.
    """
    folder = Path(options["folder"])
    if process.first:
        folder.mkdir(parents=True, exist_ok=True)
    all_gather_objects(None)  # the folder exists now
    if not all(all_gather_objects(folder.exists())):
        return {"equal": None}
    pipeline, data = build(options, device)
    pipeline.train(data, options["microbatches"])
    saved = Checkpoints(folder, background=True)
    saved.save(pipeline, {}, 1.0)
    pipeline.train(data, options["microbatches"])
    saved.wait()
    resumed, _ = build(options, device)
    restore(resumed, folder / f"{options['microbatches']:09}")
    resumed.train(data, options["microbatches"])
    return {"equal": _digest(pipeline) == _digest(resumed)}


def measure_speed(options: Options, device: torch.device, process: Process) -> Findings:
    """Return the throughput after a warm-up, the largest peak memory of a process, and the largest prediction without workspaces.

    On a GPU, also return how much of the peak was predicted. The memory of a CPU is resident.
    """
    pipeline, data = build(options, device)
    pipeline.train(data, options["microbatches"])  # whose first microbatch is also checked
    release_memory(device)
    started = time.perf_counter()
    result = pipeline.train(data, options["microbatches"])
    seconds = time.perf_counter() - started
    peak = max(all_gather_objects(peak_memory(device)))
    predicted = max(memory.tensors for memory in predict_memory(pipeline.plan, pipeline.recipe, data.targets_spec))
    samples = options["batch"] * options.get("dp", 1) * options["microbatches"]
    found = {"samples_per_second": samples / seconds, "training_loss": result.loss}
    found |= {"peak_bytes": peak, "predicted_tensor_bytes": predicted}
    if device.type == "cuda":
        found["predicted_over_peak"] = predicted / peak
    return found


PARTS: dict[str, Callable[[Options, torch.device, Process], Findings]] = {
    "inspect": inspect,
    "exchange": exchange,
    "blocks": compare_blocks,
    "compare": compare_with_cpu,
    "train": train,
    "resume": resume,
    "speed": measure_speed,
}
"""Parts by name."""
