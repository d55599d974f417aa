"""Processes that measure one contestant after another, as :mod:`launch.bench.command` asks.

Arguments are the port of a store, the number of the next trial, and the timeout of communication. Trials and results travel through
the store. A process that fails writes its error there and ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from petra import METHODS, Numerics, TensorSpec, make_plan
from petra.cost_model.memory import predict_memory
from petra.diagnostics.process_memory import release_memory
from petra.distributed import all_gather_objects
from petra.errors import first_line
from petra.models import MODELS
from petra.plan import Plan

from ..runtime.agent import this_process
from ..runtime.machine import LOOPBACK
from .contestants import Batches, Contestant, Peer, Setting, message_type, one_device, petra, replicas, torch_schedule


class Workload(NamedTuple):
    """A network with its data. Without the side of an image, a sample is a window of tokens.

    ``sizes`` are the samples per microbatch that are tried. The last one is also the number of samples per device and update.
    """

    model: str
    options: dict[str, Any]
    optimizer: Callable[..., torch.optim.Optimizer]
    length: int
    sizes: tuple[int, ...]


SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True, fused=True)
ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)
IMAGES, TOKENS = {"classes": 1000, "stem": "imagenet"}, {"classes": 16_384, "dim": 1024, "depth": 24, "heads": 16, "size": 1024}
WORKS = {
    "RevNet-50": Workload("revnet50", IMAGES, SGD, 224, (8, 16, 32, 64)),
    "GPT": Workload("revgpt", TOKENS, ADAMW, 1024, (1, 2, 4, 8)),
}
"""Networks by name: RevNet-50 at 224², and a reversible GPT with 354 million parameters."""
SMALL = {"classes": 64, "dim": 16, "depth": 4, "heads": 2, "size": 8}
TINY = {
    "RevNet-50": Workload("revnet18", {"classes": 10, "width": 0.125}, SGD, 16, (1, 2)),
    "GPT": Workload("revgpt", SMALL, ADAMW, 8, (1, 2)),
}
"""Small networks in their place."""
ALONE = "one device"
PEERS: dict[str, Peer] = {
    ALONE: one_device,
    "PETRA": petra(METHODS["petra"], "auto"),
    "torch 1F1B": torch_schedule("Schedule1F1B"),
    "torch DDP": replicas,
}
"""How to train a network, by name."""
_BF16 = ", bf16 messages"
CONTESTANTS = (*PEERS, *(f"{name}{_BF16}" for name in PEERS if name != ALONE))
"""Names of the contestants. Those besides :data:`ALONE` and PETRA need several devices."""


@dataclass(frozen=True)
class Measurement:
    """What to measure.

    Attributes:
        work: Key of :data:`WORKS`; of :data:`TINY` if ``tiny``.
        contestant: One of :data:`CONTESTANTS`.
        batch: Samples per microbatch.
        updates: Updates to measure, after two others.
        compile: As in :class:`petra.Runtime`.
        details: Measure idle time, messages and memory too.
        host: Use samples so small that a device waits for its host: one image, or an eighth of a window of tokens.
    """

    work: str
    contestant: str
    batch: int
    updates: int
    compile: str | None = None
    tiny: bool = False
    details: bool = False
    host: bool = False


def measure(trial: Measurement, device: torch.device, rank: int, world: int) -> dict[str, Any]:
    """Measure a contestant. Every process must call this, and gets the same result.

    Returns:
        ``samples_per_second``, ``round_us`` (microseconds per forward or backward pass of a microbatch on a device), and with
        details :func:`details` of all processes that train and ``gbps`` (GB/s of messages over the busiest connection).
    """
    release_memory(device)
    work, name = (TINY if trial.tiny else WORKS)[trial.work], trial.contestant.removesuffix(_BF16)
    images, options = "dim" not in work.options, work.options
    shape = (3, work.length, work.length) if images else (work.length // (8 if trial.host else 1),)
    inputs = TensorSpec((trial.batch, *shape), torch.float32 if images else torch.int64)
    k = (8 if trial.host else work.sizes[-1] // trial.batch) * world
    numerics = Numerics(torch.bfloat16, images, message_format=None if name == trial.contestant else "bf16")
    plan = make_plan(MODELS[work.model](**options), inputs, k=k, stages=world, processes=world, numerics=numerics)
    setting = Setting(plan, rank, lambda module: work.optimizer(module.parameters()), device, trial.compile)
    batches = Batches(inputs, k, options["classes"], device)
    run = PEERS[name](setting, batches)
    run.train(1)
    run.train(1)
    seconds = max(all_gather_objects(run.train(trial.updates)))
    found = {"samples_per_second": trial.batch / seconds, "round_us": 5e5 * seconds * (world if name == "torch DDP" else 1)}
    if trial.details:
        targets = TensorSpec(tuple(batches.targets(0).shape), torch.int64)
        every = [own for own in all_gather_objects(details(run, device, trial.updates, seconds, k, targets)) if own]
        found |= {key: [own[key] for own in every] for key in every[0]}
        found["gbps"] = message_bytes(name, plan, world) / seconds / 1e9
    return found


def details(run: Contestant, device: torch.device, updates: int, seconds: float, k: int, targets: TensorSpec) -> dict[str, Any]:
    """Return what only this process knows, or nothing if it does not train.

    ``idle`` is the share of the time in which its device runs no kernel besides communication. On a CPU, and where torch's profiler
    does not know the device, operations count instead of kernels. ``reserved`` and ``predicted`` are bytes.

    Args:
        seconds: Seconds per microbatch.
    """
    own: dict[str, Any] = {"reserved": torch.cuda.max_memory_reserved(device)} if device.type == "cuda" else {}
    kinds, pipeline = torch.profiler.ProfilerActivity, run.pipeline
    on_gpu = device.type == "cuda" and kinds.CUDA in torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    before = 0 if pipeline is None else pipeline.microbatches_done
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as profile:
        run.train(updates)
    count = updates * k if pipeline is None else pipeline.microbatches_done - before
    rows = [row for row in profile.key_averages() if not any(word in row.key for word in ("nccl", "gloo", "c10d", "comms"))]
    busy = sum(row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in rows) / 1e6
    own["idle"] = max(0.0, 1 - busy / count / seconds)
    if pipeline is not None:
        own["predicted"] = predict_memory(pipeline.plan, pipeline.recipe, targets)[pipeline.rank].total
    return own if run.blocks else {}


def message_bytes(name: str, plan: Plan, world: int) -> float:
    """Return the bytes per microbatch that cross the busiest connection of a contestant, in both directions."""
    if name == "torch DDP":  # all-reduce in a ring
        return 2 * (world - 1) / world * message_type(plan.numerics).itemsize * plan.parameters / plan.k
    sizes = [
        (boundary.forward_bytes, boundary.backward_bytes if name == "PETRA" else boundary.forward_bytes)
        for boundary in plan.boundaries
    ]
    return 0.0 if name == ALONE else max(map(sum, sizes), default=0.0)


def main() -> None:
    """Measure what the store asks for until it asks for nothing more."""
    port, number, timeout = map(int, sys.argv[1:])
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(hours=1))  # type: ignore[attr-defined]
    with this_process() as process:
        device = process.device("auto")
        with process.process_group(device, timeout):
            while asked := json.loads(store.get(f"trial {number}")):
                try:
                    found = measure(Measurement(**asked), device, process.rank, process.world)
                except Exception as error:
                    store.compare_set(f"result {number}", "", json.dumps({"error": f"rank {process.rank}: {first_line(error)}"}))
                    raise
                if process.first:
                    store.set(f"result {number}", json.dumps(found))
                number += 1


if __name__ == "__main__":
    main()
