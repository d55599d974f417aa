"""The lock on a run's folder: refuses a second process, and ends with its owner."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from petra.errors import ConfigError
from petra.training import locked, new_run_folder
from tests.commands import ROOT

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


@contextmanager
def owner(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock in another process, which has a child."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.processes
def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    with owner(tmp_path) as first:
        message = rf"run_dir: expected a folder that no other run uses now, got .*, in use by process {first.pid} on "
        with pytest.raises(ConfigError, match=message + socket.gethostname()), locked(tmp_path):
            pass
        first.kill()
        first.wait()
        with locked(tmp_path) as held:
            assert held


def test_a_folder_with_nothing_but_a_lock_is_new(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        assert new_run_folder(tmp_path / "run").is_dir()
    (tmp_path / "run" / "x").touch()
    with pytest.raises(ConfigError, match="expected a new or empty folder"):
        new_run_folder(tmp_path / "run")


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with locked(tmp_path) as held:
        assert not held


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="run_dir: expected a folder that can be created"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
