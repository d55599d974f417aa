"""Many processes against one: the same weights bit for bit, and errors instead of hangs."""

import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petra import BlockSpec, Keep, Method, Model, PetraError, Pipeline, TensorSpec, UpdateRules
from petra.models import revnet18
from petra.settings import Numerics, Runtime, TransportName
from tests.support.nets import RandomSource, assert_equal, make_pipeline, mixed, mixed_net, sgd
from tests.support.processes import run_processes
from tests.support.remedies import Remedy

SETTINGS: dict[str, dict[str, Any]] = {
    "ten stages": {"k": 3, "stages": None, "numerics": Numerics(channels_last=True)},
    "d = 1": {"method": Method("petra", 1, Keep.NOTHING), "k": 3},
    "turns": {"method": Method("reversible", 0, Keep.NOTHING)},
    "graph": {"method": Method("backprop", 0, Keep.GRAPH)},
    "unequal": {"method": Method("x", (3, 0, 1), Keep.INPUT)},
    "flush": {"method": "1f1b"},
    "fill": {"method": "gpipe"},
    "double": {"method": "pipedream_2bw"},
    "remedies": {"remedy": Remedy(9, 0.3, "difference", 1.5, True, 0.9)},
    "graphs under autocast": {"method": Method("x", 2, Keep.GRAPH), "numerics": Numerics(autocast=torch.bfloat16)},
    "exact streams": {"numerics": Numerics(exact_streams=True)},
    "bf16 messages": {"numerics": Numerics(message_format="bf16")},
    "int8": {"numerics": Numerics(message_format="int8")},
    "refetch": {},
}


def train_all(rank: int | None) -> dict[tuple[str, str], tuple[dict[str, Tensor], object]]:
    """Train with each setting: a first stretch that k does not divide, an evaluation, a second stretch."""
    torch.set_num_threads(1)
    found: dict[tuple[str, str], tuple[dict[str, Tensor], object]] = {}
    transports: tuple[TransportName, ...] = ("local",) if rank is None else ("lockstep", "edge")
    for name, transport in product(SETTINGS, transports):
        large = name == "ten stages"
        source = RandomSource(batch=2, size=16, classes=10, dtype=torch.float32) if large else RandomSource()
        runtime = Runtime(transport=transport, refetch=name == "refetch" and rank is not None)
        pipeline = make_pipeline(
            revnet18(width=1 / 16) if large else mixed_net(),
            source.spec,
            **{"k": 4, "stages": [1, 2, 1, 2], "runtime": runtime, **SETTINGS[name]},
            optimizer=sgd,
            learning_rate=lambda t: 0.02 / (1 + t / 50),
            seed=6,
        )
        results = [pipeline.train(source, 14), pipeline.evaluate(source, 3), pipeline.train(source, 41 - 14 if large else 6)]
        found[name, transport] = pipeline.state_dict(), results
    return found


@pytest.mark.processes
def test_weights_and_results_do_not_depend_on_processes_or_transport(tmp_path: Path) -> None:
    """Invariant 1.

    Among the settings are delays that differ, more processes (five) than stages (four), and more stages than processes; refetching
    against storing.
    """
    alone, parts = train_all(None), run_processes(5, train_all, tmp_path)
    for name, transport in parts[0]:
        expected, results = alone[name, "local"]
        weights = {key: value for part in parts for key, value in part[name, transport][0].items()}
        assert sum(len(part[name, transport][0]) for part in parts) == len(expected)
        assert_equal(weights, expected)
        assert all(part[name, transport][1] == results for part in parts), f"{name} {transport}"


EARLY: dict[str, dict[str, Any]] = {
    "petra": {},
    "flush": {"method": "1f1b"},
    "turns": {"method": "backprop"},
    "together": {"method": "gpipe", "rules": UpdateRules(clip=0.1, clip_globally=True)},
    "replicas": {"dp": 2, "stages": [3, 3]},
}


def early(name: str, transport: TransportName) -> Pipeline:
    settings = {"k": 4, "stages": [1, 2, 1, 2], "learning_rate": lambda t: 0.02, **EARLY[name]}
    return mixed(runtime=Runtime(transport=transport), **settings)


def stop_early(rank: int, by: int, after: int) -> dict[tuple[str, str], tuple[int, bool]]:
    """How far a stretch of 300 microbatches came that one process stops, and whether it is as if so many had been planned."""
    found = {}
    for name, transport in zip(EARLY, ("lockstep", "edge", "lockstep", "edge", "auto"), strict=True):
        stopped, asked = early(name, transport), iter([False] * after)  # type: ignore[arg-type]
        stopped.train(RandomSource(), 300, stop=lambda asked=asked: next(asked, rank == by))
        planned = early(name, transport)  # type: ignore[arg-type]
        planned.train(RandomSource(), stopped.microbatches_done)
        results = [pipeline.train(RandomSource(), 5) for pipeline in (stopped, planned)]
        weights = planned.state_dict()
        same = results[0] == results[1] and all(torch.equal(v, weights[key]) for key, v in stopped.state_dict().items())
        found[name, transport] = stopped.microbatches_done - 5, same
    return found


@pytest.mark.processes
def test_all_processes_stop_after_the_same_microbatch(tmp_path: Path) -> None:
    parts = run_processes(4, stop_early, tmp_path, 2, 1)
    for case, (clock, _) in parts[0].items():
        assert 16 <= clock < 200, case
        assert all(part[case] == (clock, True) for part in parts), case


def test_one_process_stops_at_once() -> None:
    pipeline = early("petra", "local")
    asked = iter([False] * 9)
    assert pipeline.train(RandomSource(), 300, stop=lambda: next(asked, True)).targets == 4 * pipeline.microbatches_done
    assert 9 < pipeline.microbatches_done < 40


class Enlarge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, -1, 4200, 4200) * 1.0


def send_large(rank: int) -> list[float]:
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 5))
    stream = RandomSource(batch=1, size=1, dtype=torch.float32)
    stream.inputs = lambda m: torch.full((1, 1, 1, 1), float(m))  # type: ignore[method-assign]
    model, losses = Model.of("large", {"enlarge": Enlarge(), "scale": nn.Conv2d(1, 1, 1), "head": head}), []
    for transport in ("lockstep", "edge"):
        runtime = Runtime(transport=transport)  # type: ignore[arg-type]
        pipeline = make_pipeline(model, TensorSpec((1, 1, 1, 1), torch.float32), stages=[1, 1, 1], optimizer=sgd, runtime=runtime)
        losses.append(pipeline.train(stream, 6).loss)
    return losses


@pytest.mark.processes
def test_messages_above_64_megabytes_arrive(tmp_path: Path) -> None:
    """Small ones would pass where sizes that block the sender hang."""
    first, *others = run_processes(3, send_large, tmp_path)
    assert others == [first, first]
    assert first[0] == first[1] > 0


class OneStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, dtype=torch.float64)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.conv(x1)


@pytest.mark.processes
def test_no_thread_outlives_the_process_group(tmp_path: Path) -> None:
    """One that does may crash the interpreter's exit. No module keeps the group alive, as torch.distributed.nn would."""
    program = f"""
import gc, os, weakref, torch, torch.distributed as dist
before = len(os.listdir("/proc/self/task"))
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
from petra import Pipeline
import torch._dynamo  # as optimizers do
dist.all_reduce(torch.zeros(3))
dist.destroy_process_group()
gc.collect()
assert group() is None
assert len(os.listdir("/proc/self/task")) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)


def adam(module: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(module.parameters())


def broken_block() -> nn.Module:
    if not nn.Linear(1, 1).weight.is_meta:
        raise ValueError("no weights")
    return nn.Linear(3, 3)


def refused(rank: int) -> list[str]:
    """Return the errors of pipelines whose processes disagree, or of which one rank has no stage or a stage without the error."""
    plain: dict[str, Any] = {"optimizer": sgd, "method": "backprop"}
    blocks = (BlockSpec("a", partial(nn.Linear, 6, 3)), BlockSpec("b", partial(nn.Linear, 3, 3)))
    model, failing = Model("mine", blocks), Model("mine", (blocks[0], BlockSpec("b", broken_block)))
    good, spec, flat = mixed_net(), RandomSource().spec, TensorSpec((4, 6), torch.float32)
    misfit = Model("bad", (*good.blocks[:3], BlockSpec("odd", OneStream), *good.blocks[4:]))
    found = []
    for wrong, inputs, settings in (
        (good, RandomSource(batch=4 + 4 * rank).spec, {"stages": 2}),
        (good, spec, {"k": 1 + rank}),
        (good, spec, {"dp": 1 + rank}),
        (good, spec, {"numerics": Numerics(gradient_format=("int8", "bf16")[rank]), "stages": 2}),
        (misfit, spec, {}),
        (model, flat, {"optimizer": adam, "remedy": Remedy(compensation=True), "stages": 1}),
        (model, flat, {"remedy": Remedy(discount=3), "stages": 1}),
        (model, flat, {"optimizer": lambda module: sgd(module[5]), "stages": 1}),
        (failing, flat, {}),
    ):
        with pytest.raises(PetraError) as error:
            make_pipeline(wrong, inputs, **plain | settings)
        found.append(f"{type(error.value).__name__}: {error.value}")
    return found


@pytest.mark.processes
def test_errors_of_one_rank_are_raised_on_all_ranks(tmp_path: Path) -> None:
    """Invariant 8, among others."""
    first, second = run_processes(2, refused, tmp_path)
    assert first == second
    shapes, k, dp, numerics, misfit, *stages = first
    assert numerics == "ConfigError: gradient_format: expected int8 as on rank 0, got bf16 on rank 1"
    assert "messages between stage 1 (rank 0) and stage 2 (rank 1): expected " in shapes
    assert all(shape in shapes for shape in ("float64[4, 8, 4, 4]", "float64[8, 8, 4, 4]"))
    assert (k, dp) == tuple(f"ConfigError: {name}: expected 1 as on rank 0, got 2 on rank 1" for name in ("k", "dp"))
    assert "block block3: expected an input that it accepts, got float64[4, 8, 4, 4] from block odd" in misfit
    assert stages == [
        "ConfigError: optim: expected sgd with momentum > 0, which SpikeCompensation requires, got adam",
        "ConfigError: learning_rate: expected a function with remedy.discount, got None",
        "ConfigError: optimizer: expected a function that returns a stage's optimizer, given the module of its blocks, "
        "got IndexError (index 5 is out of range)",
        "ModelError: block b: expected a function that builds it, got ValueError (no weights)",
    ]
