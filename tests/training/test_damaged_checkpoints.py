"""Checkpoints with random damage: each is skipped with a warning, is a one-line error, or is read correctly, and runs no code.

The tests try a few hundred; ``pytest tests/training/test_damaged_checkpoints.py --hypothesis-profile=long`` tries 2,500.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petra import PetraError, Pipeline
from petra.training import Checkpoints, newest, restore
from petra.training.checkpoint import FACTS, MANIFEST, checksum, write_synced
from petra.training.state import state_of
from petra.training.weight_files import State
from tests.data.test_imagenet import damaged
from tests.support.fakes import Evil
from tests.support.nets import RandomSource, make_pipeline, mixed_net, sgd

OLD, NEW = "000000003", "000000006"
FILES = ("0.pt", FACTS, MANIFEST)
OBJECTS: list[Any] = [{}, [], None, 3, "text", {"files": {}}, {"files": []}, {"files": {FACTS: 1}}, {"clock": "x", "score": "y"}]
OBJECTS += [{"clock": 6, "score": [1]}, {"clock": -1, "score": None}, {"clock": 6, "score": None, "trainer": 3}, {"clock": 1e400}]


@dataclass(frozen=True, repr=False)
class Saved:
    """Folder with two intact checkpoints, a pipeline to load them into, and the states that they hold."""

    folder: Path
    pipeline: Pipeline
    states: dict[str, State]
    contents: dict[str, dict[str, bytes]]
    evil: bytes
    canary: Path

    def reset(self) -> None:
        """Restore the intact files."""
        shutil.rmtree(self.folder)
        for name, files in self.contents.items():
            (self.folder / name).mkdir(parents=True)
            for file, content in files.items():
                (self.folder / name / file).write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("damaged")
    pipeline = make_pipeline(mixed_net(channels=2), RandomSource().spec, k=2, optimizer=sgd)
    checkpoints, states = Checkpoints(root / "checkpoints"), {}
    for name in (OLD, NEW):
        pipeline.train(RandomSource(), 3)
        checkpoints.save(pipeline, {"trainer": {}})
        states[name] = {key: value.clone() for key, value in state_of(pipeline).items()}
    contents = {name: {f.name: f.read_bytes() for f in (root / "checkpoints" / name).iterdir()} for name in states}
    assert sorted(contents[NEW]) == sorted(FILES)
    canary = root / "canary"
    yield Saved(root / "checkpoints", pipeline, states, contents, pickle.dumps(Evil(canary)), canary)
    assert not canary.exists(), "a file ran code"


@st.composite
def damages(draw: st.DrawFn) -> Callable[[Saved, Path], None]:
    """Draw one or two changes to the folder of a checkpoint."""

    def one() -> Callable[[Saved, Path], None]:
        name, other = draw(st.sampled_from(FILES)), draw(st.sampled_from(FILES))
        how = draw(st.sampled_from(["bytes", "flip", "missing", "older", "other", "json", "evil", "cut", "folder"]))
        fraction, seed = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 7))
        value = draw(st.sampled_from(OBJECTS))
        wrong = draw(damaged(b"0" * 500)) if how == "bytes" else b""

        def apply(saved: Saved, folder: Path) -> None:
            path = folder / name
            content = (path.is_file() and path.read_bytes()) or b" "  # an earlier change may have emptied it
            place = int(fraction * len(content))
            path.unlink() if path.is_file() else None
            written = {
                "flip": content[:place] + bytes([content[place] ^ 1 << seed]) + content[place + 1 :],
                "bytes": content[:place] + wrong + content[place:],
                "older": saved.contents[OLD][name],
                "other": saved.contents[NEW][other],
                "json": json.dumps(value).encode(),
                "evil": saved.evil * (1 + 100 * seed),
                "cut": content[:place],
            }
            if how == "folder":
                path.mkdir(exist_ok=True)
            elif how != "missing" and not path.is_dir():
                path.write_bytes(written[how])

        return apply

    steps = [one() for _ in range(draw(st.integers(1, 2)))]

    def apply_all(saved: Saved, folder: Path) -> None:
        for step in steps:
            step(saved, folder)

    return apply_all


def same(saved: Saved, name: str) -> bool:
    """Return whether the pipeline's state equals a checkpoint's, bit for bit."""
    found, expected = state_of(saved.pipeline), saved.states[name]
    return found.keys() == expected.keys() and all(torch.equal(value, found[key]) for key, value in expected.items())


@given(damage=damages())
def test_the_checkpoint_before_a_damaged_one_is_used(damage: Any, saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    saved.reset()
    damage(saved, saved.folder / NEW)
    caplog.clear()
    path = newest(saved.folder)
    assert path is not None
    restore(saved.pipeline, path)
    assert same(saved, path.name), f"{path.name} was read incorrectly"
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("petra")]
    if path.name == OLD:
        (message,) = warned
        assert message.startswith(f"checkpoint {saved.folder / NEW}: ")
    else:
        assert not warned


@given(damage=damages())
def test_a_manifest_that_matches_the_damage_runs_no_code(damage: Any, saved: Saved) -> None:
    """Wrong numbers then go unnoticed, but anything that is not a checkpoint must be a one-line error."""
    saved.reset()
    folder = saved.folder / NEW
    damage(saved, folder)
    if not (folder / MANIFEST).is_dir():
        sums = {path.name: checksum(path) for path in folder.iterdir() if path.name != MANIFEST and path.is_file()}
        write_synced(folder / MANIFEST, {"files": sums})
    try:
        path = newest(saved.folder)
        assert path is not None
        restore(saved.pipeline, path)
    except PetraError as error:
        text = str(error)
    else:
        text = f"{saved.folder}: no error"
    assert str(saved.folder) in text
    assert "\n" not in text
    assert not saved.canary.exists()
