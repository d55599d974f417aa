"""launch.plan, the file of unequal machines, and what they change in the partition."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from launch.config.compose import compose_overrides
from launch.config.machines import read_machines, write_machines
from launch.doctor.links import describe, measure_speeds
from launch.doctor.machine import Report
from launch.plan import main
from launch.run.build import set_up
from launch.run.dry_run import memory_table
from launch.runtime.rank import Process
from petra import ConfigError
from petra.cost_model.machines import Connection, Device, Link, Machines
from petra.cost_model.zero_bubble import PREDICTED

SMALL = ["model=revnet18", "model.width=0.0625", "data=synthetic", "data.batch_size=2"]
FILE = """
devices:
  - {count: 2, memory: 80}
  - {speed: 0.5, memory: 40}
links:
  - {count: 2, forward: {bandwidth: 12, latency: 20}, backward: {bandwidth: 10}}
"""
TWO = "devices: [{}, {}]\nlinks: "


def test_a_file_of_machines(tmp_path: Path) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text(FILE)
    found = read_machines(str(path))
    assert found.devices == (Device(1.0, 80e9), Device(1.0, 80e9), Device(0.5, 40e9))
    assert found.connections == (Connection(Link(12e9, pytest.approx(20e-6)), Link(10e9, 0.0)),) * 2  # type: ignore[arg-type]
    again = str(tmp_path / "again.json")
    write_machines(again, found)
    assert read_machines(again).devices == found.devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: [{speedx: 1}]", "speedx"),
        ("devices: [{speed: 0}]", "speed: expected a number >= 1e-12 and <= 1e12, got 0"),
        ("devices: [{speed: .inf}]", "speed: expected a number >= 1e-12 and <= 1e12, got inf"),
        ("devices: [{memory: .nan}]", "memory: expected null or a number > 0, got nan"),
        (
            f"{TWO}[{{forward: {{bandwidth: 1, latency: .inf}}, backward: {{bandwidth: 1}}}}]",
            "latency: expected a number >= 0",
        ),
        ("devices: [{count: 3}]", "links: expected 2, one between each two neighbours of 3 processes, got 0"),
        ("devices: [", "YAML"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cluster\.machines") as error:
        read_machines(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="missing"):
        read_machines(str(tmp_path / "missing.yaml"))


def test_machines_that_the_doctor_describes() -> None:
    reports = [Report(rank, f"{rank // 2} (host)", "cpu", 64, 1, {}, {}, ()) for rank in range(4)]
    pair, slow = Connection(Link(5e9, 1e-5), Link(4e9, 1e-5)), Connection(Link(1e9, 1e-3), Link(1e9, 1e-3))
    links = {(0, 1): pair, (2, 3): slow, (0, 2): slow}
    found = describe(reports, links, [2.0, 1.0, 4.0, 4.0], replica_size=2)
    assert found == Machines((Device(1.0, 32), Device(0.5, 32)), (pair,))
    assert measure_speeds(torch.device("cpu"))[0] > 0


def test_plan_prints_all_methods_and_recommends_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--devices", "4", *SMALL, "k=8"])
    out = capsys.readouterr().out
    assert all(f"| {name} " in out for name in PREDICTED)
    recommended = re.search(r"recommended: (.*)", out).group(1).split()  # type: ignore[union-attr]
    pasted = shlex.split(re.search(r"to train: (.*)", out).group(1))  # type: ignore[union-attr]
    assert pasted == ["petra", "train", "--nproc", "4", *SMALL, "k=8", *recommended]
    device, parts = re.search(r"fullest device, (\d), in GB: (.*)", out).groups()  # type: ignore[union-attr]
    overrides = [*SMALL, "k=8", *recommended, "trainer.transport=lockstep"]
    setup = set_up(compose_overrides(overrides), Process(rank=0, world=4, local_rank=0, local_world=4))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in memory_table(setup).splitlines()[2:]]
    assert [row[:2] for row in rows] == [[str(j), str(j + 1)] for j in range(4)]
    totals = [float(row[-1]) / 1e3 for row in rows]
    chosen = dict(override.split("=") for override in recommended)
    auto = ", d=auto" if "method.delay" in chosen else ""
    (column,) = [float(line.split("|")[6]) for line in out.splitlines() if line.startswith(f"| {chosen['method']}{auto} ")]
    assert totals[int(device) - 1] == max(totals) == pytest.approx(column, rel=0.01)
    assert sum(float(part.split()[1]) for part in parts.split(", ")) == pytest.approx(column, rel=0.01)


def test_memory_that_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--devices", "4", "--memory", "1e-6", *SMALL])
    assert re.search(
        r"not possible:\n- petra: memory: expected at least \S+ GB for device \d, got 1e-06 GB", capsys.readouterr().out
    )


def test_options_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--devices", "0", *SMALL])
    assert capsys.readouterr().err == "error: --devices: expected a number > 0, got 0\n"


@pytest.mark.parametrize(("name", "value"), [("latency", "inf"), ("teraflops", "-1"), ("bandwidth", "1e300"), ("memory", "nan")])
def test_numbers_without_a_prediction_are_refused(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(["--devices", "2", f"--{name}={value}", *SMALL])
    printed = capsys.readouterr()
    assert (printed.out, printed.err.splitlines()[:1]) == ("", printed.err.splitlines())
    assert printed.err.startswith(f"error: --{name}: expected ")
    assert printed.err.endswith(f"got {float(value)}\n")


def test_a_plan_for_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--devices", "1", *SMALL])
    out = capsys.readouterr().out
    assert "recommended: method=" in out
    assert "method.delay=" not in out
