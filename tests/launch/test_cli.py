"""The command ``petra`` and all commands at a terminal: arguments, what imports torch, any encoding, closed pipes, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from launch.cli import take_processes
from launch.runtime import agent, terminal
from launch.runtime.agent import ONE_MACHINE
from launch.runtime.rank import Process
from petra.data import load_dataset
from petra.errors import ConfigError, DataError
from tests.structure import ROOT
from tests.support.commands import refused
from tests.support.processes import PIPES, environment


def python(code: str, *words: str, env: dict[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    options = {**PIPES, "encoding": "utf-8", "env": environment(**(env or {})), **options}
    return subprocess.run([sys.executable, "-c", code, *words], timeout=120, **options)  # type: ignore[call-overload,no-any-return]


IMPORTS = """
import json, runpy, sys
for line in json.loads(sys.argv[1]):
    sys.argv, status = line, None
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
    print("ended", status, *(name for name in ("torch", "matplotlib", "sklearn", "hydra") if name in sys.modules))
"""
"""Program that runs a module with the arguments of each line, and prints its status and which slow packages were imported."""


@pytest.mark.processes
def test_the_command_line_itself_imports_neither_torch_nor_hydra() -> None:
    lines = [["petra", *line.split()] for line in ("--version", "--help", "no_command", "-sc query=bash")]
    ended = [line for line in python(IMPORTS, json.dumps(lines)).stdout.splitlines() if line.startswith("ended")]
    assert len(ended) == len(lines)
    assert [line for line in ended if line not in ("ended None", "ended 0")] == ["ended 2"]


@pytest.mark.processes
def test_errors_appear_before_torch_is_imported() -> None:
    expected = {
        "petra train model._target_=mnist": "model._target_: expected petra.",
        "petra train k=0": "k: expected an integer >= 1, got 0",
        "petra train --nproc 2 data=mnist": "data: expected camvid, cifar10, ",
        "petra train": "command line: expected arguments such as experiment=demo (about two minutes)",
        "petra evaluate nowhere": "command line: expected the folder of a run, got nowhere without a config.yaml",
        "petra evaluate run=x": "command line: expected the folder of a run first (petra COMMAND RUN), got run=x",
        "petra compare nowhere --out x.foo": "--out: expected a file name that ends in .png, .svg or .pdf, got x.foo",
    }
    ended = python(IMPORTS, json.dumps([line.split() for line in expected]), env={"PYTHONWARNINGS": "ignore"})
    assert {line.removesuffix(" hydra") for line in ended.stdout.splitlines()} == {"ended 2"}
    for line, message in zip(ended.stderr.splitlines(), expected.values(), strict=True):
        assert line.startswith(f"error: {message}")


@pytest.mark.processes
def test_a_module_that_starts_no_command_is_refused() -> None:
    ended = subprocess.run([sys.executable, "-m", "launch.cli", "train"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.splitlines()) == (
        2,
        ["error: command line: expected python -m petra COMMAND, got python -m launch.cli, which starts nothing"],
    )


def test_a_path_that_may_not_be_read_is_one_line() -> None:
    """Such as a folder of somebody else, of which even the question whether a file exists is refused. Other errors are faults."""

    @terminal.command
    def reads(error: OSError) -> None:
        raise error

    denied: Any = PermissionError(13, "Permission denied", "/data/x")
    assert refused(reads, denied) == "/data/x: can't be read or written (Permission denied)"
    with pytest.raises(OSError, match="File name too long"):
        Path("a" * 300).exists()
    with pytest.raises(DataError, match=r"a: can't be read \(File name too long\)"):
        load_dataset("text", root="a" * 300)
    with pytest.raises(FileNotFoundError):
        reads(FileNotFoundError(2, "No such file or directory", "/data/x"))


def test_an_unknown_command_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["petra", "trian"])
    assert refused(cli.main, None) == "command: expected train or another name from petra --help, got trian"
    assert refused(cli.main, ["xyz"]) == "command: expected a name from petra --help, got xyz"


def test_processes_are_taken_from_the_arguments_and_start_through_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_processes(["k=4"]) == (None, ["k=4"])
    assert take_processes(["k=4", "--nproc", "10", "seed=1"]) == (10, ["k=4", "seed=1"])
    assert take_processes(["--nproc=2"]) == (2, [])
    for words in (["--nproc"], ["--nproc", "0"], ["--nproc=two"]):
        with pytest.raises(ConfigError, match="--nproc: expected an integer >= 1"):
            take_processes(words)
    started = []
    monkeypatch.setattr(agent, "run_agent", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "argv", ["petra"])
    cli.main(["train", "--nproc", "2", "trainer.device=cpu", "model.width=0.0625"])
    cli.main(["doctor", "--nproc", "2", "trainer.device=cpu"])
    flags = [*ONE_MACHINE, "--nproc-per-node", "2"]
    assert started[0] == (flags, "train", ["trainer.device=cpu", "model.width=0.0625"])
    assert started[1] == (flags, "doctor", ["trainer.device=cpu"])
    expected = "--nproc: expected one of the commands train, resume, evaluate, doctor, got plan"
    assert refused(cli.main, ["plan", "--nproc", "2"]) == expected


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("petra train ", ["k=", "model=", "model.", "optim."], []),
        ("petra train model=rev", ["model=revnet18", "model=revgpt"], ["model=resnet18"]),
        ("petra plan --machines a k=4 optim.", ["optim.lr=", "optim.momentum="], ["model.width="]),
        ("petra train --np", ["--nproc"], ["--multirun"]),
        ("petra generate run --t", ["--tokens", "--temperature"], ["--prompt"]),
        ("petra train trainer.precision=", ["trainer.precision=bf16", "trainer.precision=fp16"], []),
        ("petra train optim.nonfinite=s", ["optim.nonfinite=skip"], []),
        ("petra plan experiment=petra/q", ["experiment=petra/quick"], ["experiment=demo"]),
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
        cli.main(["-sc", "query=bash"])
    printed = capsys.readouterr()
    assert {*some} <= {*printed.out.split()}
    assert not {*none} & {*printed.out.split()}
    assert printed.err == ""


@pytest.mark.processes
def test_a_folder_of_the_users_own_adds_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nk: 7\n")
    code = "import petra.__main__ as p; p.main()"
    done = python(code, "train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job", "seed=3", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "k: 7", done.stderr
    assert "seed: 3" in done.stdout.splitlines()


WRITER = """
from launch.runtime.terminal import command
@command
def main():
    for line in range(20000):
        print(line, "\\u03c4 \\u2192 \\u2713", flush=line % 100 == 0)
    print("reached the end", file=__import__("sys").stderr)
main()
"""


@pytest.mark.processes
def test_a_command_reaches_its_end_whatever_happens_to_its_output() -> None:
    """The reader has ended, stdout is closed, the disk is full, or the terminal lacks characters, which are replaced."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = python(WRITER, stdout=writer), python(WRITER, stdout=None, preexec_fn=lambda: os.close(1))
    os.close(writer)
    with open("/dev/full", "w") as full:
        ended += python(WRITER, stdout=full), python(WRITER, env={"PYTHONIOENCODING": "ascii"})
    warning = "warning: output can't be written (No space left on device); the rest is discarded\n"
    assert [process.returncode for process in ended] == [0] * 4
    assert [process.stderr for process in ended] == [f"{told}reached the end\n" for told in ("", "", warning, "")]
    assert ended[3].stdout.splitlines()[-1] == "19999 ? ? ?"


@pytest.mark.processes
@pytest.mark.parametrize("when", ["starts", "runs", "exits"])
def test_ctrl_c_ends_a_command_with_status_130_and_nothing_else(when: str) -> None:
    """The signal arrives while Python starts, as in a process of petra train --nproc, while the command runs, or at its exit."""
    program = (
        "import atexit, time\nfrom launch.runtime.terminal import command\ndef wait():\n  print(1, flush=True)\n  time.sleep(60)\n"
        f"@command\ndef main():\n    {'atexit.register(wait)' if when == 'exits' else 'wait()'}\nmain()"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK if when == "starts" else signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        handle = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
        process = subprocess.Popen([sys.executable, "-c", program], env=environment(), preexec_fn=handle, **PIPES)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdout is not None
    if when != "starts":
        assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, "")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=x WORLD_SIZE=2", "RANK: expected an integer from 0 to 1 .*, got x"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=abc", "MASTER_PORT: expected an integer from 1 to 65535, got abc"),
    ],
)
def test_environment_variables_of_a_rank(variables: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(ConfigError, match=f"environment variable {message}"):
        Process.from_environment()


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ("SLURM_PROCID=1 SLURM_NTASKS=2", "SLURM_PROCID: expected one task .*, got 2 tasks of Slurm"),
        ("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2", "SLURM_PROCID: .* got 2 tasks of Slurm"),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK: .* got 4 tasks of Open MPI"),
        ("PMI_RANK=0 PMI_SIZE=2", "PMI_RANK: .* got 2 tasks of PMI"),
        ("PMIX_RANK=3", "PMIX_RANK: .* got several tasks of PMIx"),
        ("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2", "MV2_COMM_WORLD_RANK: .* got 2 tasks of MVAPICH"),
        ("PET_NODE_RANK=0 PET_NNODES=2 PET_MASTER_ADDR=a", "PET_NODE_RANK: .* got 2 tasks of Kubeflow, which petra node joins"),
        ("PMI_RANK=0 PMI_SIZE=1", None),
        ("SLURM_PROCID=0 SLURM_NTASKS=8", None),  # in the script of a job
        ("SLURM_NTASKS=8", None),  # in a terminal of salloc
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1", None),  # in an interactive step
        ("SLURM_PROCID=1 SLURM_NTASKS=2 RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", None),
    ],
)
def test_tasks_of_a_launcher_that_do_not_know_each_other_are_refused(
    variables: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    if told is None:
        assert Process.from_environment().world == (2 if "WORLD_SIZE" in variables else 1)
    else:
        with pytest.raises(ConfigError, match=f"environment variable {told}: each would be a run of its own"):
            Process.from_environment()
        for line in (["train", "--nproc", "2", "trainer.device=cpu"], ["doctor", "--nproc", "2"]):  # each task would start two
            monkeypatch.setattr(sys, "argv", ["petra"])
            assert refused(cli.main, line).startswith("environment variable ")


def test_a_user_without_a_name_gets_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers and wandb ask for the name; containers run with a number alone."""
    monkeypatch.setenv("LOGNAME", "restored afterwards")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with suppress(SystemExit):
        cli.main(["--version"])
    assert os.environ.get("LOGNAME") == str(os.getuid())
