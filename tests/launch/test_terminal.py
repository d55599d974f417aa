"""Commands at a terminal: errors before torch is imported, any encoding, closed pipes, Ctrl-C, environment variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from launch.runtime.rank import Process
from petra import ConfigError
from tests.structure import ROOT

IMPORTS = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print(ended.code, *(name for name in ("torch", "matplotlib", "sklearn") if name in sys.modules))
"""
"""Program that runs a module as its arguments say, and prints its status and which slow packages it has imported."""


def python(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}  # type: ignore[dict-item]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, *words], env=environment, timeout=60, encoding="utf-8", **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("launch.train model._target_=mnist", "model._target_: expected petra."),
        ("launch.train --nproc 2 data=mnist", "data: expected camvid, cifar10, "),
        ("launch.sweep k=1,0", "k: expected an integer >= 1, got 0"),
        ("launch.sweep", "command line: expected arguments such as experiment=demo (about a minute)"),
        ("launch.evaluate nowhere", "command line: expected the folder of a run, got nowhere without a config.yaml"),
        ("launch.compare nowhere --out x.foo", "--out: expected a file name that ends in .png, .svg or .pdf, got x.foo"),
    ],
)
def test_errors_appear_before_torch_is_imported(words: str, message: str) -> None:
    ended = python("-c", IMPORTS, *words.split())
    assert ended.stdout == "2\n"
    assert ended.stderr.startswith(f"error: {message}")
    assert ended.stderr.count("\n") == 1


WRITER = """
from launch.runtime.terminal import command
@command
def main():
    for line in range(20000):
        print(line, "\\u03c4 \\u2192 \\u2713", flush=line % 100 == 0)
    print("reached the end", file=__import__("sys").stderr)
main()
"""


def test_a_command_outlives_the_reader_of_its_output() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = python("-c", WRITER, stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "reached the end\n")


def test_a_command_without_stdout_runs() -> None:
    ended = python("-c", WRITER, stdout=None, preexec_fn=lambda: os.close(1))
    assert (ended.returncode, ended.stderr) == (0, "reached the end\n")


def test_a_full_disk_for_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ended = python("-c", WRITER, stdout=full)
    warning = "warning: output can't be written (No space left on device); the rest is discarded\n"
    assert (ended.returncode, ended.stderr) == (0, f"{warning}reached the end\n")


def test_characters_that_the_terminal_lacks_are_replaced() -> None:
    ended = python("-c", WRITER, env={"PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "19999 ? ? ?")


@pytest.mark.parametrize("blocked", [False, True])
def test_ctrl_c_ends_a_command_with_status_130_and_nothing_else(blocked: bool) -> None:
    """With ``blocked``, the signal arrives while Python starts, as in a process of petra train --nproc."""
    program = (
        "import time\nfrom launch.runtime.terminal import command\n@command\ndef main():\n    print(1, flush=True)\n"
        "    time.sleep(60)\nmain()"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK if blocked else signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell starts background jobs with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdout is not None
    if not blocked:
        assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, "")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "environment variable RANK: expected an integer from 0 to 1 .*, got x"),
        ({"RANK": "0"}, "environment variable WORLD_SIZE: expected an integer >= 1, got nothing"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "environment variable MASTER_ADDR: expected the address of rank 0 .*, got nothing"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"},
            "environment variable MASTER_PORT: expected an integer from 1 to 65535, got abc",
        ),
    ],
)
def test_environment_variables_of_a_rank(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Process.from_environment()
