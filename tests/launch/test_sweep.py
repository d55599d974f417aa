"""launch.sweep: which runs start, which are skipped, and the table of results."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from launch import sweep
from launch import train as training
from launch.config.compose import compose_overrides
from launch.run.training import run
from launch.runtime import agent
from petra import ConfigError
from tests.support.commands import ALONE, refused

pytestmark = pytest.mark.usefixtures("shared_profiles")

TINY = ["data=synthetic", "data.images=16", "data.batch_size=8", "model.width=0.0625", "trainer.epochs=1"]


def test_every_combination_is_a_job_with_a_folder_of_its_own() -> None:
    found = sweep.jobs(["k=1,2", "seed=3", "method.delay=[1,2],1", "trainer.stages=[4,6]"], Path("out"))
    assert [job.folder.name for job in found] == [
        f"k={k}_method.delay={delay}" for k, delay in (("1", "-1,2-"), ("1", "1"), ("2", "-1,2-"), ("2", "1"))
    ]
    assert found[1].overrides == ("k=1", "seed=3", "method.delay=1", "trainer.stages=[4,6]")
    assert [job.folder for job in sweep.jobs(["k=3"], Path("out"))] == [Path("out/run")]
    with pytest.raises(ConfigError, match=r"command line: expected an override in Hydra's syntax, got k=\[1 \("):
        sweep.jobs(["k=[1"], Path("out"))
    with pytest.raises(ConfigError, match=r"^model=glob\(revnet\*\): "):
        sweep.jobs(["model=glob(revnet*)"], Path("out"))


@pytest.mark.parametrize("name", ["plain", "two words", "it's", 'say "a"', "x=1,2"])
def test_folders_are_quoted_for_hydra(name: str) -> None:
    job = sweep.Job((), Path("/out") / name)
    assert compose_overrides(job.command()).run_dir == f"/out/{name}"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run the sweep's launch.train in this process. Return the folders of the runs that it trained."""
    folders: list[str] = []

    def in_this_process(command: list[str]) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "launch.train"]
        monkeypatch.setattr(sys, "argv", command[2:])
        training.main()
        return subprocess.CompletedProcess(command, int("seed=13" in command))

    def train(flags: list[str], module: str, overrides: list[str]) -> None:
        assert (flags, module) == (["--standalone", "--nproc-per-node", "2"], "launch.train")
        config = compose_overrides(overrides)
        folders.append(Path(str(config.run_dir)).name)
        if config.seed != 13:
            run(config, ALONE)

    monkeypatch.setattr(sweep.subprocess, "run", in_this_process)
    monkeypatch.setattr(agent, "run_agent", train)
    with patch.dict(os.environ):
        yield folders


def swept(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        sweep.main([*arguments, *TINY])
    return ended.value.code


def test_an_interrupted_sweep_continues(trained: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--processes", "2", "--out", str(tmp_path), "trainer.device=cpu"]
    assert swept(*here, "seed=1,13") == 1
    assert trained == ["seed=1", "seed=13"]
    captured = capsys.readouterr()
    assert f"failed: {tmp_path}/seed=13" in captured.err
    assert "1 of 2 runs finished" in captured.out

    assert swept(*here, "seed=1,2") == 0
    assert trained == ["seed=1", "seed=13", "seed=2"]
    summary, rows = json.loads((tmp_path / "seed=2" / "summary.json").read_text()), capsys.readouterr().out.splitlines()
    assert rows[-4].startswith("| seed=1 | synthetic | petra | 2 | 4 | 1 of 1 |"), rows
    assert rows[-3].startswith("| seed=2 | synthetic | petra | 2 | 4 | 1 of 1 |")
    assert f"| {summary['test_loss']:.4f} | {summary['test_accuracy']:.2%} |" in rows[-3]
    assert rows[-1] == "2 of 2 runs finished"

    (tmp_path / "seed=2" / "summary.json").unlink()
    assert swept(*here, "seed=1,2") == 0
    assert trained == ["seed=1", "seed=13", "seed=2", "seed=2"]
    assert "resuming from" in capsys.readouterr().out

    assert "a finished run with another schedule.gamma" in refused(sweep.main, [*here, *TINY, "seed=1,2", "schedule.gamma=0.5"])
    assert refused(sweep.main, [*here, *TINY, "k=1,0"]) == "k: expected an integer >= 1, got 0"
    assert len(trained) == 4
