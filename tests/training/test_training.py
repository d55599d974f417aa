"""Learning rate, optimizer, records, progress, and epochs of a small pipeline."""

import fcntl
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from petra import ConfigError, DataError, TensorSpec
from petra.data import EvalSource, TrainSource, load_dataset
from petra.diagnostics.process_memory import release_memory
from petra.models import resnet18
from petra.settings import Numerics
from petra.training import (
    JsonLines,
    Lines,
    MultiStep,
    Trainer,
    export,
    facts_in,
    load,
    load_into,
    locked,
    new_run_folder,
    peak_memory,
    sgd,
    write_json,
)
from petra.training.weight_files import hash_of
from tests.support.fakes import Evil
from tests.support.nets import RandomSource, assert_equal, make_pipeline, mixed, mixed_net
from tests.support.processes import environment


def test_run_folder_is_new_or_empty(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path / "runs" / "a")
    with locked(folder):
        assert new_run_folder(folder) == folder, "a folder with nothing but a lock is new"
    write_json(folder / "summary.json", {"k": 1})
    assert json.loads((folder / "summary.json").read_text()) == {"k": 1}
    with pytest.raises(ConfigError, match=r"run_dir: expected a new or empty folder, got .* contains files"):
        new_run_folder(folder)
    for use in (new_run_folder, lambda path: locked(path).__enter__()):
        with pytest.raises(ConfigError, match="run_dir: expected a folder that can be created, got"):
            use(folder / "summary.json" / "below")


def test_peak_memory_counts_what_was_held() -> None:
    before = peak_memory(torch.device("cpu"))
    size = before + 2**25
    torch.ones(size, dtype=torch.uint8)
    assert size <= peak_memory(torch.device("cpu")) < before + size + 2**28
    release_memory(torch.device("cpu"))
    assert peak_memory(torch.device("cpu")) < size, "another run of this process has a peak of its own"


def test_bar_shows_the_current_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    data = RandomSource()
    bar = Lines(3, 10, make_pipeline(mixed_net(), data.spec, optimizer=sgd, learning_rate=lambda t: 0.1 * t).recipe, bar=True)
    bar.seconds = 0.0
    bar.epoch_begin(2, start=10, done=0)
    bar.microbatch(torch.tensor([8, 4.0, 6], dtype=torch.float64))  # images, summed loss, correct
    assert "epoch 2/3 " in (shown := capsys.readouterr().out.split("\r")[-1])
    assert "1/10, loss 0.5000, accuracy 75.00%" in shown
    assert re.search(r"learning rate 1\.1, \d+:\d\d:\d\d left$", shown.rstrip())


def test_trainer_records_every_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = load_dataset("synthetic", images=40, classes=4)
    train, test = TrainSource(dataset, 8, seed=0), EvalSource(dataset, 8)
    rate = MultiStep(peak=0.05, microbatches_per_epoch=train.batches_per_epoch, epochs=2, milestones=[1])
    settings = {"k": 2, "stages": 2, "optimizer": sgd, "learning_rate": rate}
    model, spec = resnet18(classes=4, width=1 / 16), TensorSpec((8, 3, 32, 32), torch.float32)
    pipeline = make_pipeline(model, spec, method="backprop", **settings)
    progress = Lines(2, train.batches_per_epoch, pipeline.recipe)
    progress.seconds = 0.0
    log = JsonLines(tmp_path / "metrics.jsonl")
    history = Trainer(pipeline, train, test, watchers=[log, progress]).fit(2)
    log.close()

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == history
    assert [(row["epoch"], row["microbatches"]) for row in rows] == [(1, 5), (2, 10)]
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.05, 0.005])
    assert all(0 <= row["test_accuracy"] <= 1 and row["seconds"] > 0 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * (5 + 1)
    assert lines[0].startswith("epoch 1/2, 1/5: loss ")
    assert lines[-1].startswith("epoch 2/2: loss ")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_exported_file_holds_facts_beside_the_tensors(suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    numerics = Numerics(channels_last=True)
    pipeline, other = (mixed(learning_rate=lambda t: 0.1, numerics=numerics, seed=seed) for seed in (0, 1))
    state = {key: value.clone() for key, value in pipeline.state_dict().items()}
    facts = {"preparation": {"size": 8, "moments": [[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]], "crop": 1.0}}
    export(pipeline, tmp_path / f"with{suffix}", facts)
    export(pipeline, tmp_path / f"without{suffix}")
    assert facts_in(tmp_path / f"with{suffix}") == {"clock": 0, "sha256": hash_of(state), **facts}
    assert facts_in(tmp_path / f"without{suffix}").keys() == {"clock", "sha256"}
    assert {path.name for path in tmp_path.iterdir()} == {f"with{suffix}", f"without{suffix}"}
    mixed_net().build(1).load_state_dict(load(tmp_path / f"with{suffix}"), strict=True)
    load_into(other, load(tmp_path / f"with{suffix}"), "x")
    assert_equal(other.state_dict(), state)
    with pytest.raises(DataError, match=r"x: contains nose\.weight, but mixed has no such block"):
        load_into(other, {"nose.weight": torch.zeros(1)}, "x")
    content, first = bytearray((tmp_path / f"with{suffix}").read_bytes()), next(iter(state.values()))
    content[content.index(first.numpy().tobytes()) + 2] ^= 1
    (tmp_path / f"flipped{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=r"flipped\.\w+: expected the weights that were exported, as their hash says"):
        load(tmp_path / f"flipped{suffix}")
    for wrong in (bytes(content[:100]), b"damaged", pickle.dumps(Evil(tmp_path / "canary"))):
        (tmp_path / f"damaged{suffix}").write_bytes(wrong)
        for read in (facts_in, load):
            with pytest.raises(DataError, match="cannot be read as exported weights"):
                read(tmp_path / f"damaged{suffix}")
    assert not (tmp_path / "canary").exists(), "the file ran code"


HOLD = """
import sys, time
from pathlib import Path
from petra.training.records import locked
with locked(Path(sys.argv[1])):
    if not __import__("os").fork():
        time.sleep(60)  # a child, such as a data worker, that outlives the owner
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.processes
def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    """The lock is held by another process, which has a child."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "locked\n"
            message = rf"run_dir: expected a folder that no other run uses now, got .*, in use by process {first.pid} on "
            with pytest.raises(ConfigError, match=message + socket.gethostname()), locked(tmp_path):
                pass
            first.kill()
            first.wait()
            with locked(tmp_path) as held:
                assert held
        finally:
            os.killpg(first.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with locked(tmp_path) as held:
        assert not held
