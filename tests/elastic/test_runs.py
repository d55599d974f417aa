"""Runs that lose a replica: a killed and a stopped process, the end of the run, and refused settings."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from launch.config.compose import compose_overrides
from launch.elastic import processes
from launch.elastic.processes import Replica
from launch.run.build import check
from launch.runtime.rank import Process
from petra.errors import ConfigError
from petra.training.checkpoint import checkpoints
from stress.kill_replicas import RUN, Replicas, kill_many
from tests.support.refusals import refuses


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_killed_replica_returns_with_the_state_of_the_other(tmp_path: Path) -> None:
    """Also the replica whose first process writes the records. A signal to stop ends both with the same checkpoint."""
    with Replicas(tmp_path, 2, 2) as run:
        kills = kill_many(run, 2, random.Random(1))
        restarts = [replica.restarts for replica in run.replicas]
        assert sum(restarts) == 2
        trained = run.trained()
        while run.trained() < trained + 6:
            run.supervise()
        run.stop()
        assert run.assert_equal() >= 2
        missed = [event["missed"] for event in run.events() if event["event"] == "back"]
        assert [row["missed"] for row in kills] == missed
        assert all(row["samples"] == 2 * (row["last"] - row["first"] + 1) > 0 for row in missed)
        assert "Traceback" not in run.output()
        clock = int(checkpoints(tmp_path / "run" / "checkpoints")[0].name)
        rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["microbatches"] for row in rows] == [16 * (i + 1) for i in range(len(rows))]
        assert clock >= rows[-1]["microbatches"]


test_settings_that_do_not_fit_are_refused = refuses(
    lambda change: check(compose_overrides([*RUN, "dp=2", "data.batch_size=4", change]), Process(0, 4, 0, 4)),
    ("dp=1", "cluster.elastic: expected false without replicas (dp > 1), got true"),
    ("checkpoint.every=null", "checkpoint.every: expected an integer >= 1 with cluster.elastic=true, got null"),
    ("resume=null", "cluster.elastic: expected false without run_dir and resume=auto, got true"),
    ("optim.shard=true", "optim.shard: expected false with cluster.elastic=true, got true"),
    ("optim.weights=bf16", "optim.weights: expected float32 with cluster.elastic=true, got bf16"),
)


def test_processes_must_be_told_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, message in (
        ("PETRA_REPLICA", "2", "environment variable PETRA_REPLICA: expected an integer from 0 to 1 with cluster.elastic=true"),
        ("PETRA_STORE", "here", "environment variable PETRA_STORE: expected <host>:<port>, got here"),
    ):
        monkeypatch.setenv("PETRA_REPLICA", "1")
        monkeypatch.setenv("PETRA_STORE", "host:1")
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError) as caught:
            Replica.from_environment(Process(0, 2, 0, 2), 2)
        assert str(caught.value).startswith(message)


def test_a_terminal_does_not_send_ctrl_c_to_the_processes_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leads a session of its own, so that it gets the signal once, from the process that started it."""
    program = "import os, sys; sys.exit(os.getsid(0) != os.getpid())"

    def start(command: list[str], **settings: object) -> "subprocess.Popen[bytes]":
        return popen([sys.executable, "-c", program], **settings)  # type: ignore[call-overload, no-any-return]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(processes, "stop_signals", list)
    with pytest.raises(SystemExit) as ended:
        processes.run_replicas(2, 2, "train", [])
    assert ended.value.code == 0
