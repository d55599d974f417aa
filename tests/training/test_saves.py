"""A save that is killed, or that meets a full or read-only disk, leaves earlier checkpoints intact."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn, serialization

from petra import BlockSpec, Model, PetraError, Pipeline
from petra.errors import DataError
from petra.training import Checkpoints, export, facts_in, facts_of, load, newest, records, restore, sgd
from petra.training import checkpoint as protocol
from petra.training.checkpoint import checkpoints
from tests.support.nets import RandomSource, assert_equal, make_pipeline, restored, weights
from tests.support.processes import context

DATA = RandomSource(size=2, dtype=torch.float32)


def small() -> Pipeline:
    linear = Model("small", (BlockSpec("a", nn.Flatten), BlockSpec("b", lambda: nn.Linear(12, 5))))
    return make_pipeline(linear, DATA.spec, optimizer=sgd, learning_rate=lambda t: 0.1)


def trace(steps: list[str], last: int | None) -> None:
    """Note the steps of a save, and end this process before step number ``last``, or never.

    Steps are lines of checkpoint.py and records.py, and calls of functions of torch.save.
    """

    def reach(frame: FrameType, event: str, argument: object) -> Any:
        own = frame.f_code.co_filename in (protocol.__file__, records.__file__)
        if event == "line" or (event == "call" and frame.f_code.co_filename == serialization.__file__):
            if len(steps) == last:
                os._exit(9)
            steps.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return reach if own else None

    threading.settrace(reach)  # for the thread that writes in the background
    sys.settrace(reach)


def save_forked(pipeline: Pipeline, folder: Path, background: bool, last: int | None) -> int:
    """Train and save in a fork that ends before step ``last``, and return its exit status."""
    if (pid := os.fork()) == 0:
        store = Checkpoints(folder, keep=1, background=background)
        trace(steps := [], last)
        pipeline.train(DATA, 1)
        store.save(pipeline, {})
        if background:
            pipeline.train(DATA, 1)
        store.wait()
        sys.settrace(None)
        (folder.parent / "steps").write_text(json.dumps(steps))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_everywhere(folder: Path, background: bool) -> None:
    """Die before every second step of a save, or every fourth in the background, at its first and last occurrence.

    A save includes the removal of the old checkpoint.
    """
    torch.set_num_threads(1)
    pipeline, expected = small(), dict[int, dict[str, Tensor]]()
    for clock in (1, 2):
        pipeline.train(DATA, 1)
        expected[clock] = weights(pipeline)
    before, work = folder / "before", folder / "work"
    pipeline = small()
    pipeline.train(DATA, 1)
    Checkpoints(before, keep=1).save(pipeline, {})

    def attempt(last: int | None) -> int:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(before, work)
        return save_forked(pipeline, work, background, last)

    assert attempt(None) == 0
    steps = json.loads((folder / "steps").read_text())
    first = {step: index for index, step in reversed(list(enumerate(steps)))}
    last = {step: index for index, step in enumerate(steps) if step.startswith("checkpoint.py")}
    found = set()
    for index in sorted({*first.values(), *last.values()})[:: 4 if background else 2]:
        assert attempt(index) == 9, steps[index]
        again = restored(small(), work)
        assert_equal(weights(again), expected[again.microbatches_done])
        found.add(again.microbatches_done)
        again.train(DATA, 2 - again.microbatches_done)
        Checkpoints(work, keep=1).save(again, {})
        assert_equal(weights(again), expected[2])
        assert {p.name for p in work.iterdir()} == {"000000002"}, steps[index]
    assert found == {1, 2}
    assert len(first) > 80


@pytest.mark.processes
@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_dies_at_any_step_leaves_an_intact_checkpoint(background: bool, tmp_path: Path) -> None:
    process = context.Process(target=die_everywhere, args=(tmp_path, background))  # a new process without other threads
    process.start()
    process.join(170)
    process.kill()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(("name", "count"), [("rename", 1), ("rename", 2), ("rename", 3), ("rmtree", 1)])
def test_a_second_save_of_a_microbatch_that_dies_leaves_one_of_the_two(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that with the score, after the evaluation. It dies before a change of the folder."""
    store, pipeline = Checkpoints(tmp_path, keep=1), small()
    pipeline.train(DATA, 1)
    store.save(pipeline, {})
    owner, calls = (Path if name == "rename" else shutil), iter([False] * (count - 1) + [True])
    original = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(KeyboardInterrupt):
            store.save(pipeline, {}, score=1.0)
    found = newest(tmp_path)
    assert found is not None
    restore(small(), found)
    store.save(pipeline, {}, score=2.0)
    assert [facts_of(path)["score"] for path in checkpoints(tmp_path)] == [2.0]


def test_a_last_save_that_fails_in_the_background_is_told_at_exit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    store, pipeline = Checkpoints(tmp_path / "file" / "c", background=True), small()
    pipeline.train(DATA, 1)
    store.save(pipeline, {})
    store.settle()
    for _ in range(2):
        protocol._tell_failed(ref(store))
    assert caplog.messages == [
        f"checkpoint {tmp_path}/file/c/000000001: cannot be written (Not a directory); there is no earlier one"
    ]


def test_facts_have_names_of_their_own(tmp_path: Path) -> None:
    pipeline = small()
    with pytest.raises(PetraError, match="facts: expected names other than clock, score, got clock"):
        Checkpoints(tmp_path, facts={"clock": 3, "note": "x"})
    with pytest.raises(PetraError, match="facts: expected names other than clock, note, score, got note"):
        Checkpoints(tmp_path, facts={"note": "x"}).save(pipeline, {"note": "y"})
    pipeline.train(DATA, 1)
    export(pipeline, tmp_path / "a.pt", {"clock": 9, "sha256": "0", "note": "x"})
    assert load(tmp_path / "a.pt")
    assert facts_in(tmp_path / "a.pt")["clock"] == 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "petra", str(place)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_checkpoints_intact(background: bool, disk: Path) -> None:
    """Training can continue, and the next save succeeds once the disk has space."""
    pipeline, store = small(), Checkpoints(disk / "c", keep=1, background=background)
    pipeline.train(DATA, 1)
    store.save(pipeline, {})
    store.wait()
    before = weights(pipeline)
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
    pipeline.train(DATA, 1)
    trained = weights(pipeline)

    def save() -> None:
        store.save(pipeline, {})
        store.wait()

    message = rf"checkpoint {disk}/c/000000002: cannot be written \(No space left on device\); earlier checkpoints are"
    with pytest.raises(PetraError, match=message):
        save()
    assert_equal(weights(pipeline), trained)
    assert_equal(weights(restored(small(), disk / "c")), before)
    (disk / "filler").unlink()
    save()
    assert_equal(weights(restored(small(), disk / "c")), trained)
    assert {p.name for p in (disk / "c").iterdir()} == {"000000002"}


@pytest.mark.parametrize("where", ["own tensors", "another process"])
def test_a_first_save_that_fails_leaves_nothing_and_names_no_earlier_one(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def failing(*_: object) -> Iterator[None]:
        yield
        if any(tmp_path.rglob(f"*{protocol.TENSORS}")):
            raise DataError("another process: cannot be written (No space left on device)")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "own tensors":
        monkeypatch.setattr(torch, "save", full)
    else:
        monkeypatch.setattr(protocol, "raise_on_all_ranks", failing)
    pipeline = small()
    pipeline.train(DATA, 1)
    with pytest.raises(DataError) as error:
        Checkpoints(tmp_path / "checkpoints").save(pipeline, {})
    assert not [*(tmp_path / "checkpoints").iterdir()]
    assert where != "own tensors" or str(error.value).endswith("(No space left on device); there is no earlier one")
