"""The folder of a run: as it was after a failed start, complete whatever fails at the end; sweeps and their tables."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from launch import train as training
from launch.compare import comparison
from launch.compare import main as compare
from launch.config.compose import command_line_jobs
from launch.run import build
from launch.runtime.reporting import report_errors
from petra.engine.stage import Stage
from petra.errors import CommunicationError, ConfigError, PetraError
from petra.training.records import locked
from tests.support.commands import ALONE, TINY, lines, planned
from tests.support.commands import train as start

pytestmark = pytest.mark.usefixtures("shared_profiles")

RUN = (*TINY, "data.images=32", "data.size=16", "trainer.stages=2", "k=2")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def raise_(error: Exception) -> Any:
    raise error


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, whose module ``loggers`` has a logger that can't start."""
    monkeypatch.chdir(tmp_path)
    module: Any = ModuleType("loggers")
    module.Offline = lambda folder: ((folder / "session").mkdir(), raise_(ConfigError("logger: no connection")))
    monkeypatch.setitem(sys.modules, "loggers", module)
    return tmp_path


class NoKey(Exception):
    """As ``wandb.errors.UsageError``, which is no ValueError."""


def no_wandb(patch: pytest.MonkeyPatch) -> str:
    module: Any = ModuleType("wandb")
    module.__spec__, module.run, module.Image, module.Settings = sys.__spec__, None, Path, dict
    module.init = lambda **options: raise_(NoKey("No API key configured.\nUse `wandb login` to log in."))
    patch.setitem(sys.modules, "wandb", module)
    return "logger=wandb"


def own_logger(patch: pytest.MonkeyPatch) -> str:
    return "logger._target_=loggers.Offline"


def no_shared_storage(patch: pytest.MonkeyPatch) -> str:
    def refuse(folder: Path, *_: object) -> None:
        (folder / "seen").mkdir(parents=True)
        raise ConfigError("run_dir: not shared")

    patch.setattr("launch.run.training.require_shared", refuse)
    return ""


def first_forward(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Stage, "forward", lambda *_: raise_(ConfigError("stage 1: no kernel")))
    return ""


@pytest.mark.parametrize(
    ("fails", "words"),
    [(no_wandb, "run_dir=new/run"), (own_logger, "run_dir=empty"), (no_shared_storage, ""), (first_forward, "run_dir=new/run")],
)
def test_a_start_that_fails_leaves_no_folder_behind(
    fails: Callable[[pytest.MonkeyPatch], str], words: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("empty").mkdir()
    with monkeypatch.context() as patch:
        added = fails(patch).split()
        with pytest.raises((ConfigError, NoKey)):
            start(*RUN, *words.split(), *added)
    assert files(place) == {"empty": b""}


def test_the_same_command_works_after_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        word = no_wandb(patch)
        with pytest.raises((ConfigError, NoKey)):
            start(*RUN, "run_dir=run", word)
    start(*RUN, "run_dir=run")


def test_a_run_in_its_default_folder_is_not_resumed_while_it_trains(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of one process don't exclude each other, so this looks for the lock."""
    held: list[Path] = []

    @contextmanager
    def noted(folder: Path) -> Iterator[bool]:
        held.append(folder)
        with locked(folder) as found:
            yield found

    monkeypatch.setattr("launch.run.records.locked", noted)
    start(*RUN)
    assert held == [*Path("runs").iterdir()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    start(*RUN, f"run_dir={folder}")
    return folder


@pytest.mark.parametrize("fails", [no_wandb, own_logger, no_shared_storage, first_forward])
def test_a_resumed_run_that_does_not_start_is_as_before(
    fails: Callable[[pytest.MonkeyPatch], str], finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(finished)
    words = [f"run_dir={finished}", "resume=auto", "trainer.epochs=2", "optim.lr=0.2", "resume_change=[optim.lr]"]
    with monkeypatch.context() as patch:
        added = fails(patch).split()
        with pytest.raises((ConfigError, NoKey)):
            start(*RUN, *words, *added)
    after = files(finished)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {".lock"}


def test_files_of_a_run_survive_a_start_that_fails_on_a_full_disk(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        path.open("wb").close()
        raise OSError(28, "No space left on device")

    before = files(finished)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(PetraError):
            start(*RUN, f"run_dir={finished}", "resume=auto", "k=3")
    assert {name: content for name, content in files(finished).items() if name != ".lock"} == {
        name: content for name, content in before.items() if name != ".lock"
    }


def test_exports_of_a_training_that_is_replaced_are_removed_when_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    start(*RUN, "run_dir=run", "trainer.epochs=2", "trainer.export=pt", "checkpoint.keep=2")
    last = max(Path("run/checkpoints").iterdir())
    shutil.rmtree(last)
    words = ("run_dir=run", "trainer.epochs=2", "trainer.export=none", "checkpoint.keep=2", "resume=auto")
    with pytest.raises(ConfigError):
        start(*RUN, *words, "optim.lr=0.3")
    assert Path("run/model.pt").exists()
    start(*RUN, *words)
    assert "run/model.pt is removed when training begins: it has a later microbatch" in capsys.readouterr().out
    assert not Path("run/model.pt").exists()


def test_an_error_of_wandb_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"^logger: wandb can't start with WANDB_MODE=online \(No API key configured\. Use `wandb login` to log in\.\)$"
    monkeypatch.setenv("WANDB_MODE", "online")
    word = no_wandb(monkeypatch)
    with pytest.raises(ConfigError, match=expected):
        start(*RUN, "run_dir=run", word)


def test_what_fails_after_the_first_microbatch_keeps_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Stage.forward
    fail_at_6 = lambda stage, m, x: raise_(ConfigError("late")) if m == 6 else forward(stage, m, x)  # noqa: E731
    monkeypatch.setattr(Stage, "forward", fail_at_6)
    with pytest.raises(ConfigError, match="late"):
        start(*RUN, "run_dir=run", "trainer.epochs=2")
    assert len(lines(Path("run/metrics.jsonl"))) == 1


@pytest.mark.parametrize("broken", ["report", "export", "timeline", "logger"])
def test_the_summary_is_written_before_all_that_may_fail(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawing library, a full disk, a server of a logger: the numbers of the run are there, and a resumed run writes the rest."""
    names = {"report": "launch.run.records.write_report", "export": "launch.run.training.export"}
    names |= {"timeline": "launch.run.training.write_timeline", "logger": "petra.training.JsonLines.close"}
    words = (*RUN, "run_dir=run", "trainer.export=pt", "trainer.trace=2")
    with monkeypatch.context() as patch:
        patch.setattr(names[broken], lambda *_, **__: raise_(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            start(*words)
    assert Path("run/summary.json").exists()
    start(*words, "resume=auto")
    assert Path("run/report.html").exists()
    assert Path("run/model.pt").exists()


def test_an_error_says_how_to_continue_if_there_is_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = Stage.forward
    monkeypatch.setattr(
        Stage, "forward", lambda stage, m, x: raise_(CommunicationError("receiving failed")) if m == 6 else forward(stage, m, x)
    )
    with pytest.raises(SystemExit), report_errors(ALONE):
        start(*RUN, "run_dir=run", "trainer.epochs=2")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("another process has died, hangs or can't be reached; to continue: petra resume run")
    with pytest.raises(SystemExit), report_errors(ALONE):
        start(*RUN, "run_dir=other", "trainer.epochs=2", "checkpoint.keep=0")
    assert "to continue" not in capsys.readouterr().err


def swept(*words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["petra train", *RUN, *words])
        training.train(command_line_jobs(), ALONE)


def cells(text: str) -> list[dict[str, str]]:
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_sweep_names_its_folders_and_ends_with_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    swept("--multirun", "optim.lr=0.1,0.2", "seed=1")
    names = sorted(path.name for path in Path("runs").iterdir() if path.is_dir())
    assert [re.sub(r"^[\d-]+_[\d-]+_", "", name) for name in names] == [
        "revnet18_petra_synthetic_optim.lr=0.1",
        "revnet18_petra_synthetic_optim.lr=0.2",
    ]
    rows = cells(capsys.readouterr().out)
    assert [row["run"] for row in rows] == names
    assert [row["optim.lr"] for row in rows] == ["0.1", "0.2"]
    assert not {"seed", "run_dir"} & rows[0].keys()
    assert re.fullmatch(r"\d+\.\d\d%", rows[0]["test accuracy"])


def test_a_single_run_prints_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    swept("run_dir=run")
    assert "|" not in capsys.readouterr().out


@pytest.fixture
def compared(place: Path) -> Iterator[list[Path]]:
    row = '{"epoch": 1, "microbatches": 8, "train_loss": 1.5, "test_loss": 1.25, "test_accuracy": 0.5}\n'
    head = "format: 3\nmethod: {name: petra, delay: 2, keep: nothing}\nk: 4\ntrainer: {epochs: 3, stages: null}\n"
    head += "data: {_target_: petra.data.digits}\n"
    folders = []
    for name, rest in (
        ("2026-11-22_a", "model: {_target_: petra.models.revnet18, width: 0.5}\nrun_dir: a\n"),
        ("2026-11-22_b", "model: {_target_: petra.models.revnet34, width: 0.25}\nrun_dir: b\nseed: 5\n"),
    ):
        folders.append(place / name)
        folders[-1].mkdir()
        (folders[-1] / "config.yaml").write_text(head + rest)
        (folders[-1] / "metrics.jsonl").write_text(row)
    return folders


def test_runs_are_compared_by_what_differs(compared: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = cells(comparison(compared))
    extra = {key: (first[key], second[key]) for key in first if key not in ("run", "data", "method", "d", "k")}
    assert {key: value for key, value in extra.items() if value[0] != value[1]} == {
        "model": ("revnet18", "revnet34"),
        "model.width": ("0.5", "0.25"),
        "seed": ("", "5"),
    }
    assert "method.keep" not in first
    compare([*map(str, compared), "--out", "x.svg"])
    assert "model=revnet18, model.width=0.5" in Path("x.svg").read_text()  # and not two timestamps


def test_of_two_kinds_of_networks_only_what_differs_within_a_kind_has_a_column(compared: list[Path]) -> None:
    config = (compared[1] / "config.yaml").read_text()
    for folder, depth in ((compared[1], 8), (compared[0].with_name("c"), 16)):
        folder.mkdir(exist_ok=True)
        other = config.replace("revnet34, width: 0.25", f"revgpt, dim: 64, depth: {depth}")
        (folder / "config.yaml").write_text(other)
        (folder / "metrics.jsonl").write_bytes((compared[0] / "metrics.jsonl").read_bytes())
    rows = cells(comparison([*compared, compared[0].with_name("c")]))
    assert [row["model.depth"] for row in rows] == ["", "8", "16"]
    assert not {"model.dim", "model.width"} & rows[0].keys()


@pytest.mark.parametrize(("device", "language"), [("cpu", r"C\+\+ compiler \(g\+\+"), ("cuda", r"C compiler \(gcc")])
def test_a_missing_compiler_is_found_before_training(device: str, language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpp_compiler", lambda: raise_(OSError("none")))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setattr(build.Process, "device", lambda *_: torch.device(device))
    with pytest.raises(ConfigError, match=rf"^trainer\.compile: expected null, eager or aot_eager without a {language}"):
        planned(*RUN, "trainer.compile=inductor")


def test_a_compilation_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kind = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})
    with pytest.raises(SystemExit) as ended, report_errors(ALONE):
        raise kind("CppCompileError: C++ compile error\n\nCommand:\n...")
    told = capsys.readouterr().err.splitlines()
    assert (ended.value.code, len(told)) == (2, 1)
    assert told[0].startswith(
        "error: trainer.compile: expected null, or blocks that torch.compile compiles, before training; got CppC"
    )
    monkeypatch.setenv("TORCHDYNAMO_VERBOSE", "1")
    with pytest.raises(kind), report_errors(ALONE):
        raise kind("whole")
