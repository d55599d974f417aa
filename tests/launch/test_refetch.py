"""``data.refetch``: which runs fetch the first stage's inputs again, what a dry run shows of it, and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launch.config.compose import compose_overrides
from launch.run.build import set_up
from launch.run.dry_run import stage_map
from launch.run.training import run
from petra import ConfigError
from petra.cost_model.memory import stored_activations
from petra.training import load
from tests.launch.test_launch import ALONE, TINY, planned
from tests.launch.test_own import OWN, SMALL, folder

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.usefixtures("shared_profiles")


@pytest.mark.parametrize(
    ("overrides", "refetches"),
    [
        ("data=cifar10", True),
        ("data=imagenet", False),
        ("data=imagenet data.refetch=true", True),
        ("data=cifar10 data.refetch=false", False),
        ("method=backprop", False),
        ("method=reversible", False),  # one microbatch in flight
        ("method=dsp", True),
        ("method=pipedream model=resnet18", True),
    ],
)
def test_the_data_set_decides_unless_the_configuration_does(overrides: str, refetches: bool) -> None:
    assert planned(*overrides.split()).plan.refetches == refetches


def test_a_value_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.refetch: expected true, false or auto, got sometimes"):
        planned("data.refetch=sometimes")
    with pytest.raises(ConfigError, match=r"method\.keep: expected graph, input, nothing, .*, got refetch"):
        planned("method.keep=refetch")


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_own_data_set_says_whether_it_is_in_memory(in_memory: bool, folder: Path) -> None:
    module = (folder / "mine.py").read_text().replace(", in_memory=True", f", in_memory={in_memory}")
    (folder / "mine.py").write_text(module)
    assert set_up(compose_overrides([*OWN, *SMALL]), ALONE).plan.refetches == in_memory


def test_the_dry_run_of_revnet50_on_imagenet_saves_35_inputs() -> None:
    setups = [planned("data=imagenet", "model=revnet50", f"data.refetch={value}") for value in ("false", "true")]
    rows = [stage_map(setup).splitlines()[4].split("|") for setup in setups]
    assert [row[7].strip() for row in rows] == ["input", "refetch"]
    stored, refetched = (stored_activations(setup.plan) for setup in setups)
    assert (stored[0], refetched[0]) == (35 * 64 * 3 * 224 * 224 * 4, 0)  # 1.35 GB
    assert stored[1:] == refetched[1:]


def test_a_resumed_run_may_fetch_inputs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stores inputs, resumed in the middle of an epoch by one that fetches them again."""
    monkeypatch.chdir(tmp_path)
    small = [
        *TINY,
        "data.size=16",
        "model.width=0.25",
        "trainer.stages=3",
        "k=2",
        "trainer.export=pt",
        "checkpoint.every=3",
        "checkpoint.keep=9",
    ]

    def train(name: str, *overrides: str) -> dict[str, torch.Tensor]:
        run(compose_overrides([*small, f"run_dir={name}", *overrides]), ALONE)
        return load(Path(name) / "model.pt")

    whole = train("whole", "data.refetch=false")
    parts = train("parts", "data.refetch=true", "resume=whole/checkpoints/000000003")
    assert all(torch.equal(value, parts[key]) for key, value in whole.items())
