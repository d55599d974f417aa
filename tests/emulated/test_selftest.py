"""``petra selftest`` on two emulated devices, as a whole command."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.selftest import command
from tests.emulated.processes import run, start


def module(rank: int, name: str, *arguments: str) -> None:
    """Run a module as ``python -m`` does."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def forked(name: str, arguments: Sequence[str], processes: int, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a module in processes of the server, which start faster than new ones."""
    ended = start(module, name, *arguments, world=processes, torchrun=True, timeout=seconds)
    return subprocess.CompletedProcess([], ended.statuses != [0] * processes, ended.outputs[0], "\n".join(ended.outputs))


def selftest(devices: int, out: str) -> None:
    """Run the command as on a machine with a number of devices. It exits if a part fails."""
    import torch

    torch.cuda.device_count = lambda: devices
    command.start_processes = forked
    command.main(["--tiny", "--out", out])


def test_all_parts_pass_and_the_report_is_written(tmp_path: Path) -> None:
    assert run(selftest, 2, str(tmp_path), timeout=170) == [None]
    found = json.loads((tmp_path / "selftest.json").read_text())
    assert (found["gpus"], found["tiny"]) == (2, True)
    planned = [*command.plan(2, tiny=True)]
    parts = {part["name"]: part for part in found["parts"]}
    assert [*parts] == [run.name for run in planned]
    assert all(part["device"] == "cuda" and command.judge(part["part"], part) == {} for part in parts.values())
    assert {part["difference"] for part in parts.values() if part["part"] == "compare"} == {0}
    transports = {name: part for name, part in parts.items() if part["part"] == "transport"}
    assert {part["transport"] for part in transports.values()} == {"lockstep", "edge"}
    assert transports["lockstep, d = 2"]["digest"] == transports["edge, d = 2"]["digest"]
    assert transports["lockstep, d = 2"]["digest"] != transports["lockstep, d = 1"]["digest"]
    for part in parts.values():
        if part["part"] == "memory":
            assert part["predicted_bytes"] == pytest.approx(part["peak_bytes"], rel=0.05)
    text = (tmp_path / "selftest.md").read_text()
    assert f"{len(planned)} of {len(planned)} parts passed" in text
    assert text.count("| passed |") == len(planned)
    assert "cuda:1" in text  # the doctor's table of links
