"""The command ``petra``: which command starts with which arguments, what imports torch, and completion of words."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from launch import cli
from launch.cli import commands, take_processes, usage
from launch.runtime import agent
from petra.errors import ConfigError
from tests.structure import ROOT


def run_python(code: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.processes
def test_the_command_line_itself_imports_neither_torch_nor_hydra() -> None:
    code = """
import sys, petra.__main__ as p
for words in (["--version"], ["--help"], ["no_command"], ["-sc", "query=bash"]):
    sys.argv = ["petra", *words]
    try: p.main()
    except SystemExit: pass
print({"torch", "hydra", "matplotlib"} & {*sys.modules})
"""
    assert run_python(code).stdout.splitlines()[-1] == "set()"


def test_help_names_each_command_and_what_it_does() -> None:
    lines = usage().splitlines()
    for name in commands():
        (line,) = (line for line in lines if line.startswith(f"  petra {name} "))
        assert len(line.split()) > 3
    assert {"train", "evaluate", "compare", "sweep", "node", "doctor"} <= {*commands()}


def test_an_unknown_command_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["petra", "trian"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: command: expected train or another name from petra --help, got trian\n"
    with pytest.raises(ConfigError, match="expected a name from petra --help, got xyz"):
        cli.run(["xyz"])


def test_processes_are_taken_from_the_arguments() -> None:
    assert take_processes(["k=4"]) == (None, ["k=4"])
    assert take_processes(["k=4", "--nproc", "10", "seed=1"]) == (10, ["k=4", "seed=1"])
    assert take_processes(["--nproc=2"]) == (2, [])
    for words in (["--nproc"], ["--nproc", "0"], ["--nproc=two"]):
        with pytest.raises(ConfigError, match="--nproc: expected an integer >= 1"):
            take_processes(words)


def test_several_processes_start_through_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(agent, "run_agent", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "argv", ["petra"])
    cli.run(["train", "--nproc", "2", "trainer.device=cpu", "model.width=0.0625"])
    cli.run(["doctor", "--nproc", "2", "trainer.device=cpu"])
    flags = ["--standalone", "--nproc-per-node", "2"]
    assert started[0] == (flags, "launch.train", ["trainer.device=cpu", "model.width=0.0625"])
    assert started[1] == (flags, "launch.doctor", ["trainer.device=cpu"])
    with pytest.raises(ConfigError, match="--nproc: expected one of the commands train, resume, evaluate, doctor, got sweep"):
        cli.run(["sweep", "--nproc", "2"])


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("petra tr", ["train"], ["sweep"]),
        ("petra train ", ["k=", "model=", "model.", "optim."], []),
        ("petra train model=rev", ["model=revnet18", "model=revgpt"], ["model=resnet18"]),
        ("petra sweep --out runs/a k=4 optim.", ["optim.lr=", "optim.momentum="], ["model.width="]),
        ("petra train --nproc=2 method=pet", ["method=petra"], ["method=dsp"]),
        ("petra evaluate runs/a trainer.dev", ["trainer.device="], []),
        ("petra train --np", [], ["--nproc"]),
        ("petra train model=no_such_model optim.", ["optim.lr="], []),
        ("petra compare ", [], ["k="]),
    ],
)
def test_hydra_completes_words(
    line: str, some: list[str], none: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr(sys, "argv", ["petra"])
    with suppress(SystemExit):
        cli.run(["-sc", "query=bash"])
    printed = capsys.readouterr()
    assert {*some} <= {*printed.out.split()}
    assert not {*none} & {*printed.out.split()}
    assert printed.err == ""


@pytest.mark.processes
def test_a_folder_of_the_users_own_adds_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nk: 7\n")
    code = "import petra.__main__ as p; p.main()"
    done = run_python(code, "train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "k: 7", done.stderr
