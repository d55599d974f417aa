"""Measure pipelines over a wide-area link, and compare them with the simulator's predictions.

python -m benchmarks.wide_area --out runs/wide_area.json                    # as root: 1 Gb/s, 20 ms in each direction
python -m benchmarks.wide_area --loss 0.001 --congestion bbr --wires float32

Two network namespaces of this machine with one process each are joined by a shaped link (:mod:`benchmarks.shaped_link`). Each round
measures the link, runs each method, and records the mean time of forward, backward and update of each stage. The simulator gets
only these times, the link and the schedule. The bandwidth is that of the fastest of seven messages or, with ``--loss``, the mean of
120 messages of the pipeline, which includes retransmissions. ``petra_fresh`` uses the smallest delay that costs no throughput
according to the simulator. ``--wires bf16`` sends messages of half the size; ``--batches`` divides the microbatches and their
messages.

With ``--device-ms``, the reversible blocks do not compute. They sleep as long as a device of this speed would compute. So the
measurement does not depend on the load of the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.report import benchmark_parser, machine, ratio, save, spread
from benchmarks.shaped_link import ADDRESSES, DEVICE, HOSTS, Shape, shaped_link
from benchmarks.simulator_check import recorded_cost
from benchmarks.two_stages import Head, Noise, Split, coupling, period, sgd
from petra import METHODS, BlockSpec, Model, Pipeline, TensorSpec
from petra.cost_model.costs import StageCost
from petra.cost_model.delays import choose_delays
from petra.cost_model.links import Link, exchange_seconds, measure_link
from petra.cost_model.simulator import predict
from petra.diagnostics.recorder import Recorder
from petra.method import Method
from petra.process_memory import keep_freed_memory
from petra.reversible import Coupling
from petra.settings import Numerics, Runtime, TransportName

TRANSPORTS: tuple[TransportName, ...] = ("lockstep", "edge")
WIRES = {"float32": None, "bf16": torch.bfloat16}
PORT = "29555"
EXCHANGES = 60
"""Messages in each direction over which the bandwidth of a lossy link is averaged."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured and predicted seconds per microbatch of each setting. Both processes must call this function."""
    keep_freed_memory()
    result: dict[str, Any] = {}
    for batch in options.batches:
        model, inputs, stages = network(options, batch)
        data, k = Noise(inputs), options.k * max(options.batches) // batch
        for wire in options.wires:
            make = partial(pipeline, model, inputs, stages, k, wire)
            fresh = fresh_method(make(METHODS["petra"], "edge"), data, k, options)
            methods = {"petra": METHODS["petra"], "petra_fresh": fresh, "1f1b": METHODS["1f1b"]}
            for name, method in methods.items():
                for transport in TRANSPORTS:
                    made = make(method, transport)
                    row = compare(made, data, transport, options)
                    row |= {"method": name, "delay": method.delay, "transport": transport, "batch": batch, "wire": wire}
                    result[f"{name}, {transport}, batch {batch}, {wire}"] = row
                    if dist.get_rank() == 0:
                        print(table({"": row}).splitlines()[-1], file=sys.stderr, flush=True)
                    del made
    return result


class _Busy(torch.autograd.Function):
    """Identity that takes some seconds in forward, and twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Device(nn.Module):
    """Function of a reversible block that a device other than the CPU computes: the process sleeps meanwhile.

    Args:
        channels: Channels of a stream.
        seconds: Seconds of a forward of one image.
    """

    def __init__(self, channels: int, seconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(channels, 1, 1))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Busy.apply(self.scale * x, self.seconds * x.shape[0])  # type: ignore[no-any-return, no-untyped-call]


def device_block(channels: int, seconds: float) -> Coupling:
    """Return a reversible block that a device computes."""
    return Coupling(Device(channels, seconds))


def network(options: argparse.Namespace, batch: int) -> tuple[Model, TensorSpec, list[int]]:
    """Return the model, its inputs, and the number of blocks in each of the two stages."""
    seconds = options.device_ms / 1e3 / max(options.batches) / options.blocks
    block = partial(device_block, options.channels, seconds) if options.device_ms else partial(coupling, options.channels)
    reversible = [BlockSpec(f"block{i}", block) for i in range(2 * options.blocks)]
    model = Model("two", (BlockSpec("split", Split), *reversible, BlockSpec("head", partial(Head, options.channels))))
    inputs = TensorSpec((batch, 2 * options.channels, options.size, options.size), torch.float32)
    return model, inputs, [options.blocks + 1, options.blocks + 1]


def pipeline(
    model: Model, inputs: TensorSpec, stages: list[int], k: int, wire: str, method: Method, transport: TransportName
) -> Pipeline:
    """Return this process's stage."""
    numerics = Numerics(channels_last=True, wire=WIRES[wire])
    runtime = Runtime(transport=transport)
    return Pipeline(model, inputs, method=method, stages=stages, k=k, optimizer=sgd, numerics=numerics, runtime=runtime)


def recorded(made: Pipeline, data: Noise, microbatches: int) -> tuple[float, list[StageCost]]:
    """Train, and return the seconds per microbatch on rank 0 and the costs of both stages."""
    dist.barrier()
    with made.hooks.attached(Recorder(made)) as recorder:
        seconds = period(made, data, microbatches)
    costs: list[Any] = [None, None]
    dist.all_gather_object(costs, recorded_cost(recorder.intervals, dist.get_rank(), made))
    return seconds, costs


def fresh_method(made: Pipeline, data: Noise, k: int, options: argparse.Namespace) -> Method:
    """Return PETRA with the smallest delay that costs no throughput on this link."""
    link = measure_link()
    recorded(made, data, 2 * k + made.plan.delays[0] + 1)
    _, costs = recorded(made, data, 2 * k + made.plan.delays[0] + 1)
    delays = choose_delays(costs, METHODS["petra"], k, link=link, transport="edge", max_delay=options.max_delay)
    found: list[Any] = [delays]
    dist.broadcast_object_list(found, 0)
    return replace(METHODS["petra"], name="petra_fresh", delay=found[0])


def mean_link(made: Pipeline) -> Link:
    """Return the link with the mean bandwidth that messages of the pipeline get, including retransmissions."""
    latency, (boundary,), rank = measure_link().latency, made.plan.boundaries, dist.get_rank()
    request, answer = (torch.zeros(size, dtype=torch.uint8) for size in (boundary.forward_bytes, boundary.backward_bytes))
    seconds = [exchange_seconds(request, answer, 1 - rank, sends_first=rank == 0, repeats=EXCHANGES) / EXCHANGES]
    dist.broadcast_object_list(seconds, 0)
    return Link((boundary.forward_bytes + boundary.backward_bytes) / (seconds[0] - 2 * latency), latency)


def compare(made: Pipeline, data: Noise, transport: TransportName, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured and predicted seconds per microbatch in every round, and the last measured link."""
    k, method = made.plan.k, made.plan.method
    microbatches = max(options.microbatches // k, 2) * k + made.plan.delays[0] + 1
    found: dict[str, Any] = {"measured": [], "predicted": []}
    recorded(made, data, microbatches)  # warms up
    for _ in range(options.rounds):
        link = mean_link(made) if options.loss else measure_link()
        seconds, costs = recorded(made, data, microbatches)
        predicted = predict(costs, method, k, link=link, transport=transport)  # type: ignore[arg-type]
        found["measured"].append(seconds)
        found["predicted"].append(predicted.period)
    return found | {"link": [link.bandwidth, link.latency], "compute": predicted.compute, "costs": [vars(c) for c in costs]}


def run(shape: Shape, arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Run both processes over a shaped link, and return what shapes it and the figures of rank 0."""
    with tempfile.TemporaryDirectory() as folder, shaped_link(shape) as kind:
        path = Path(folder, "figures.json")
        processes = []
        for rank, host in enumerate(HOSTS):
            variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
            variables |= {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
            words = ["ip", "netns", "exec", host, sys.executable, "-m", "benchmarks.wide_area", "--process", str(path), *arguments]
            processes.append(subprocess.Popen(words, env=os.environ | variables))
        try:
            if [process.wait() for process in processes] != [0, 0]:
                sys.exit("error: a process failed")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return kind, json.loads(path.read_text())


def table(rows: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each setting."""
    lines = [
        "| method | d | transport | images per microbatch | wire | images/s | predicted | predicted / measured | computing |",
        "|---" * 9 + "|",
    ]
    for row in rows.values():
        measured, predicted = (row["batch"] / spread(row[key])["median"] for key in ("measured", "predicted"))
        delay = row["delay"][0] if isinstance(row["delay"], list) else row["delay"]
        lines.append(
            f"| {row['method']} | {delay} | {row['transport']} | {row['batch']} | {row['wire']} | {measured:.0f} | {predicted:.0f} "
            f"| {ratio(row['measured'], row['predicted'])['median']:.2f} | {row['compute'] * measured / row['batch']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = benchmark_parser(__doc__, 1, "measured runs of each setting")
    parser.add_argument("--rate", type=float, default=1.0, help="gigabits per second")
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds that a packet travels in one direction")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a packet is lost")
    parser.add_argument("--mtu", type=int, default=9000, help="size of the largest packet in bytes")
    parser.add_argument("--congestion", help="TCP's congestion control (default: this machine's)")
    parser.add_argument("--blocks", type=int, default=8, help="reversible blocks per stage")
    parser.add_argument(
        "--device-ms", type=float, default=0.0, help="imitate devices: milliseconds of a stage's forward; 0: compute"
    )
    parser.add_argument("--channels", type=int, default=64, help="channels of each stream")
    parser.add_argument("--size", type=int, default=8, help="side of an image in pixels")
    parser.add_argument(
        "--batches", type=lambda text: [int(n) for n in text.split(",")], default="32,16", help="images per microbatch"
    )
    parser.add_argument("--wires", type=lambda text: text.split(","), default="float32,bf16", help="types of messages")
    parser.add_argument("--k", type=int, default=4, help="microbatches per update at the largest batch; more at smaller ones")
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of each run")
    parser.add_argument("--max-delay", type=int, default=8, help="largest delay of petra_fresh")
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        figures = measure(options)
        if dist.get_rank() == 0:
            options.process.write_text(json.dumps(figures))
        dist.barrier()
        dist.destroy_process_group()
        return
    shape = Shape(options.rate * 1e9 / 8, options.delay / 1e3, options.loss, options.mtu, options.congestion)
    started = time.monotonic()
    kind, figures = run(shape, sys.argv[1:])
    bandwidth, latency = next(iter(figures.values()))["link"]
    link = Link(bandwidth, latency)
    print(
        f"{options.rate:g} Gb/s, {options.delay:g} ms, loss {options.loss:.1%}, shaped by {kind}; measured: "
        f"{link.bandwidth * 8 / 1e9:.2f} Gb/s, {link.latency * 1e3:.1f} ms; {time.monotonic() - started:.0f} s\n"
    )
    print(table(figures))
    save(options.out, {"machine": machine(), "options": vars(options), "shaped_by": kind, "settings": figures})


if __name__ == "__main__":
    main()
