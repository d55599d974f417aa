"""``petra resume``: the configuration comes from the run's folder, and a stopped run prints the command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launch import resume
from launch.config.compose import compose_overrides
from launch.run.training import run
from petra import PetraError
from petra.errors import Interrupted
from petra.training import load
from tests.launch.test_launch import ALONE
from tests.launch.test_start import SMALL, StoppedAtOnce, train

pytestmark = pytest.mark.usefixtures("shared_profiles")


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what is printed about a run in the folder ``a b`` that stops within its first epoch, in the working directory."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("launch.run.training.StopRequest", StoppedAtOnce)
        with pytest.raises(Interrupted) as interrupted:
            train("run_dir='a b'", "checkpoint.every=2")
    return f"{interrupted.value}; {interrupted.value.hint}"


def resumed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["petra resume", *words])
    (config,) = resume.read()
    run(config, ALONE)


def test_the_printed_command_continues_the_run(stopped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.fullmatch(r"stopped on request after microbatch 2, checkpoint written; to continue: (.*)", stopped)
    assert found is not None
    command = shlex.split(found[1])
    assert command == ["petra", "resume", "a b"]
    resumed(command[2:], monkeypatch)
    train("run_dir=whole", "checkpoint.every=2")
    one, other = load(Path("a b/model.pt")), load(Path("whole/model.pt"))
    assert all(one[key].equal(other[key]) for key in one)


def test_keys_on_the_command_line_change_the_run_from_here_on(
    stopped: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed(["a b", "optim.lr=0.25", "trainer.epochs=2"], monkeypatch)
    assert "optim.lr is 0.25 from here on, was 0.1" in capsys.readouterr().out
    resumed(["a b", "trainer.epochs=3"], monkeypatch)  # keeps the change
    assert "lr: 0.25" in Path("a b/config.yaml").read_text()
    assert len(Path("a b/metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a b", "optim.speed=1"], "optim.speed: no such key"),
        (["a b", "optim=adamw"], r"optim: expected single keys of the run's configuration \(optim.KEY=VALUE\), got adamw"),
        (["new"], "command line: expected the folder of a run with a checkpoint, got new without one"),
        (["."], r"command line: expected the folder of a run, got \. without a config.yaml"),
        ([], "command line: the following arguments are required: RUN"),
    ],
)
def test_invalid_command_lines_are_errors(words: list[str], message: str, stopped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("new").mkdir()
    Path("new/config.yaml").write_text(Path("a b/config.yaml").read_text())
    with pytest.raises(PetraError, match=f"^{message}"):
        resumed(words, monkeypatch)


def test_code_of_ones_own_is_named_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("from petra.models import revnet18 as mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("launch.run.training.StopRequest", StoppedAtOnce)
    with pytest.raises(Interrupted) as interrupted:
        run(compose_overrides([*SMALL, "run_dir=run", "model._target_=net.mine", "checkpoint.every=2"]), ALONE)
    assert interrupted.value.hint.endswith("petra resume run --trust")
