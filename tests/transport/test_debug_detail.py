"""Runs with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, in which torch compares what ranks do in each group."""

from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launch.doctor import links
from launch.doctor.links import measure_links
from petra import Runtime
from petra.cost_model.machines import measure_link
from petra.distributed import all_gather_objects
from petra.training import export
from tests.structure import ROOT
from tests.support.nets import RandomSource, assert_equal, mixed, weights
from tests.support.processes import start


def begin(rank: int, world: int, folder: Path) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


def train(rank: int, folder: str) -> dict[str, Tensor]:
    """Train three stages over both transports, so that the ranks send different numbers of messages, and collect the weights."""
    found: dict[str, Tensor] = {}
    for transport in ("lockstep", "edge"):
        pipeline = mixed(stages=3, runtime=Runtime(transport=transport))  # type: ignore[arg-type]
        pipeline.train(RandomSource(), 3)
        export(pipeline, Path(folder, f"{transport}.pt"))
        assert pipeline.train(RandomSource(), 2).targets == 8
        found |= {f"{transport}/{key}": value for key, value in weights(pipeline).items()}
    return found


def gather(rank: int) -> list[int]:
    """Gather states of optimizers, and then the ranks, with a collective."""
    # Its package imports transformers, which takes seconds.
    spec: Any = spec_from_file_location("optimizers", ROOT / "petra/huggingface/optimizers.py")
    spec.loader.exec_module(optimizers := module_from_spec(spec))
    optimizers.gather_states(SimpleNamespace(param_groups=[]), SimpleNamespace(rank=rank, world=3, workers={}))
    return all_gather_objects(rank)


def measure(rank: int) -> list[int]:
    """Measure links, of which each rank has others, and then gather the ranks, with a collective."""
    device, links.LARGE_MESSAGE = torch.device("cpu"), 1 << 10
    assert measure_link(device, 2, 1 << 10).bandwidth > 0
    assert [*measure_links(device)] == [(0, 1), (1, 2)]
    return all_gather_objects(rank)


@pytest.mark.processes
def test_links_are_measured(tmp_path: Path) -> None:
    assert start(3, measure, tmp_path, timeout=120, begin=begin).require() == [[0, 1, 2]] * 3


@pytest.mark.processes
def test_states_of_optimizers_are_gathered(tmp_path: Path) -> None:
    assert start(3, gather, tmp_path, timeout=120, begin=begin).require() == [[0, 1, 2]] * 3


@pytest.mark.processes
def test_weights_are_those_of_one_process(tmp_path: Path) -> None:
    ranks = start(3, train, tmp_path, str(tmp_path), timeout=120, begin=begin).require()
    found = {key: value for rank in ranks for key, value in rank.items()}
    expected = mixed(stages=3)
    for count in (3, 2):
        expected.train(RandomSource(), count)
    assert_equal(found, {f"{transport}/{key}": t for transport in ("lockstep", "edge") for key, t in weights(expected).items()})
