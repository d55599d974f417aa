"""Nodes of a cluster: their ranks, environment variables of NCCL and gloo, GPUs of ranks, and several nodes at once."""

import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch import train as training
from launch.node import flags
from launch.runtime import agent
from launch.runtime.rank import DUMPS, NETWORK, agree_on_start, require_distinct_gpus, set_variables
from petra import ConfigError
from tests.support.commands import refused

SLURM = "SLURM_NNODES=2 SLURM_NODEID=1 SLURM_GPUS_ON_NODE=2 MASTER_ADDR=a"
NODE = "--nnodes {} --node-rank {} --nproc-per-node {} --rdzv-backend static --master-addr {} --master-port {}"
KUBERNETES = "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=gpu PET_MASTER_ADDR=b PET_MASTER_PORT=7"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("", "--standalone --local-addr 127.0.0.1 --nproc-per-node auto"),
        ("NNODES=3 NODE_RANK=2 NPROC_PER_NODE=8,8,2 MASTER_ADDR=a MASTER_PORT=1234", NODE.format(3, 2, 2, "a", 1234)),
        (KUBERNETES, NODE.format(2, 1, "gpu", "b", 7)),
        (SLURM, NODE.format(2, 1, 2, "a", 29500)),
        (
            "NNODES=1 SLURM_NNODES=2 SLURM_NODEID=0 NPROC_PER_NODE=",
            "--standalone --local-addr 127.0.0.1 --nproc-per-node auto",
        ),  # by hand under Slurm
        ("PET_NNODES=1:2", "PET_NNODES: expected one number, since the number of stages is fixed, got 1:2"),
        ("NNODES=2 MASTER_ADDR=a", "NODE_RANK: expected a value on each of 2 nodes, got nothing"),
        ("NNODES=2 NODE_RANK=0", "MASTER_ADDR: expected a value on each of 2 nodes, got nothing"),
        (f"{SLURM} SLURM_LOCALID=1", "SLURM_LOCALID: expected 0: one petra node on each machine (srun --ntasks-per-node 1), got 1"),
        ("NPROC_PER_NODE=8,2", "NPROC_PER_NODE: expected one number, or one for each of 1 node(s), got 8,2"),
    ],
)
def test_the_environment_describes_a_node(environment: str, expected: str) -> None:
    variables = dict(word.split("=", 1) for word in environment.split())
    if expected.startswith("--"):
        assert flags(variables) == expected.split()
    else:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            flags(variables)


def test_an_error_before_the_processes_start_is_reported_once_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []
    elastic = ["dp=2", "data.batch_size=4", "cluster.elastic=true", "checkpoint.every=2", "run_dir=run", "resume=auto"]
    monkeypatch.setattr(agent, "run_agent", lambda *arguments: started.append(arguments))
    for overrides, message in (
        (["--nproc", "22", *elastic], "cluster.elastic: expected false if processes have no stage, got true"),
        (["--nproc", "2", "trainer.stages=[5,4]"], "stages: expected positive numbers of blocks that sum to 10, got [5, 4]"),
    ):
        monkeypatch.setattr(sys, "argv", ["train", "trainer.device=cpu", *overrides])
        assert message in refused(training.main, None)
    assert not started


def test_processes_on_one_gpu_are_named() -> None:
    require_distinct_gpus(["a", "b", "c"])
    with pytest.raises(ConfigError, match="expected cpu, or a GPU for each process, got GPU b on ranks 1 and 2"):
        require_distinct_gpus(["a", "b", "b"])


def test_variables_for_nccl_and_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = {"NCCL_DEBUG": "INFO", DUMPS: f"{tmp_path}/a/b/rank"}
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    set_variables()
    assert environment == NETWORK | given
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("code", "cause", "status"),
    [
        (2, "process 3 failed first, with status 2", 2),
        (-9, "process 3 failed first, with signal SIGKILL", 137),
        (-15, "process 3 was stopped before training, by SIGTERM", 75),
        (-2, "process 3 failed first, with signal SIGINT", 130),
    ],
)
def test_the_first_failure_is_one_line(
    code: int,
    cause: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(arguments: list[str]) -> None:
        assert arguments == ["--signals-to-handle", "SIGQUIT", "--standalone", "-m", "petra", "train", "k=1"]
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").error("failed (exitcode: %s) local_rank: 1", code)
        raise ChildFailedError("launch.train", {3: ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file="")})

    monkeypatch.setattr("torch.distributed.run.main", fail)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # of this process
    with pytest.raises(SystemExit, match=str(status)):
        agent.run_agent(["--standalone"], "train", ["k=1"])
    assert capsys.readouterr().err == f"{cause}\n"
    assert not caplog.records


LIMIT = timedelta(seconds=20)


@pytest.mark.parametrize("world", [1, 5])
def test_all_ranks_agree_and_every_start_has_another_name(world: int) -> None:
    store, names = dist.HashStore(), list[str]()
    for late in range(world):  # starts after the others
        with ThreadPoolExecutor(world) as pool:
            early = [pool.submit(agree_on_start, store, rank, world, LIMIT) for rank in range(world) if rank != late]
            results = [agree_on_start(store, late, world, LIMIT), *(future.result() for future in early)]
        assert len(set(results)) == 1
        names.append(results[0])
    assert len(set(names)) == world
