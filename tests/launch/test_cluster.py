"""Nodes of a cluster: their ranks, environment variables of NCCL and gloo, GPUs of ranks, and several nodes at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from benchmarks.nodes import run_nodes
from launch import local, node
from launch.config.errors import CONF
from launch.config.schema import ClusterConfig, register, to_config
from launch.node import Node, first_host
from launch.runtime import agent, network
from launch.runtime.rank import Process, require_distinct_gpus
from launch.runtime.reporting import only_first_prints
from petra import ConfigError
from tests.support.agents import train

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Node(1, 0, "auto", "127.0.0.1", 29500)),
        ({"NPROC_PER_NODE": "4"}, Node(1, 0, "4", "127.0.0.1", 29500)),
        (
            {"NNODES": "3", "NODE_RANK": "2", "NPROC_PER_NODE": "8,8,2", "MASTER_ADDR": "a", "MASTER_PORT": "1234"},
            Node(3, 2, "2", "a", 1234),
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "gpu", "PET_MASTER_ADDR": "b", "PET_MASTER_PORT": "7"},
            Node(2, 1, "gpu", "b", 7),
        ),
        ({"PET_NNODES": "2:2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "b"}, Node(2, 1, "auto", "b", 29500)),
        (
            {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_NODELIST": "gpu[007,010-012]"},
            Node(2, 1, "2", "gpu007", 29500),
        ),
        ({"NNODES": "1", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "NPROC_PER_NODE": ""}, Node(1, 0, "auto", "127.0.0.1", 29500)),
    ],
    ids=["alone", "alone with processes", "by hand", "Kubernetes", "fixed range", "Slurm", "by hand under Slurm"],
)
def test_the_environment_describes_a_node(environment: dict[str, str], expected: Node) -> None:
    assert Node.from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NNODES": "two"}, "NNODES: expected an integer >= 1, got two"),
        ({"PET_NNODES": "1:2"}, "PET_NNODES: expected one number, since the number of stages is fixed, got 1:2"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK: expected a value on each of 2 nodes, got nothing"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK: expected an integer from 0 to 1, got 2"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: expected a value on each of 2 nodes, got nothing"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE: expected an integer >= 1, got 0"),
        ({"NPROC_PER_NODE": "many"}, "NPROC_PER_NODE: expected an integer >= 1, got many"),
        ({"NPROC_PER_NODE": "8,2"}, r"NPROC_PER_NODE: expected one number, or one for each of 1 node\(s\), got 8,2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: expected an integer from 1 to 65535, got 70000"),
    ],
)
def test_invalid_environments(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Node.from_environment(environment)


def test_first_host_of_a_slurm_list() -> None:
    found = [first_host(nodes) for nodes in ("login", "a,b", "gpu[003-010,12],login", "rack[2,4]n[07-09]x", "n7,n[1-2]")]
    assert found == ["login", "a", "gpu003", "rack2n07x", "n7"]


@pytest.mark.processes
def test_two_nodes_of_unequal_size_train_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on one node and one on the other, each node with an agent of torchrun as on a network."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_nodes("2,1", ["--module", "tests.support.agents", str(tmp_path / "parts.pt")], timeout=150) == [0, 0]
    parts = torch.load(tmp_path / "parts.pt")
    assert [part[0] for part in parts] == [{"node": name, "local rank": rank} for name, rank in (("0", 0), ("0", 1), ("1", 0))]
    weights = {key: value for _, states in parts for key, value in states.items()}
    expected = train()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], value) for key, value in expected.items())


def test_local_reports_an_error_once_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(local, "run_agent", lambda *arguments: started.append(arguments))
    for overrides, message in (
        (["--processes", "11"], "processes: expected 1 to 10, since revnet18 has 10 blocks, got 11"),
        (["trainer.stages=[5,4]"], "stages: expected positive numbers of blocks that sum to 10, got [5, 4]"),
        (["k=0"], "k: expected an integer >= 1, got 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["local", "trainer.device=cpu", *overrides])
        with pytest.raises(SystemExit, match="2"):
            local.main()
        assert capsys.readouterr().err.count(message) == 1
    monkeypatch.setattr(sys, "argv", ["local", "--processes", "0"])
    with pytest.raises(SystemExit, match="2"):
        local.main()
    assert "--processes: expected an integer >= 1, got 0" in capsys.readouterr().err
    assert not started

    monkeypatch.setattr(sys, "argv", ["local", "--processes", "10", "trainer.device=cpu", "k=2"])
    local.main()
    assert started == [(["--standalone", "--nproc-per-node", "10"], "launch.train", ["trainer.device=cpu", "k=2"])]


def test_only_the_first_rank_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        with only_first_prints(Process(rank=rank, world=2, local_rank=rank, local_world=2)):
            print(f"help from {rank}")
    assert capsys.readouterr().out == "help from 0\n"


def test_a_process_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Process(rank=3, world=4, local_rank=3, local_world=4).device("auto") == torch.device("cuda", 0)


def test_processes_on_one_gpu_are_named() -> None:
    store = dist.HashStore()
    for rank, gpu in ((0, "a"), (2, "b")):
        store.set(str(rank), gpu)
    require_distinct_gpus(store, 1, 3, "c")
    for rank, gpu in ((1, "b"), (2, "b"), (0, "a")):
        with pytest.raises(ConfigError, match="expected cpu, or a GPU for each process, got GPU b on ranks 1 and 2"):
            require_distinct_gpus(_with(store, 1, "b"), rank, 3, gpu)


def _with(store: dist.Store, rank: int, gpu: str) -> dist.Store:
    store.set(str(rank), gpu)
    return store


def settings(*overrides: str) -> ClusterConfig:
    register()
    with initialize_config_dir(CONF, version_base="1.3"):
        return to_config(compose("config", [f"cluster.{override}" for override in overrides])).cluster


def test_variables_for_nccl_and_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert network.variables(settings()) == {
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    chosen = settings("interfaces=[lo]", "infiniband=false", "adapters=[m0,m1]", "flight_recorder=0", f"dumps={tmp_path}/a/b")
    found = network.variables(chosen)
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=lo", "lo")
    assert (found["NCCL_IB_DISABLE"], found["NCCL_IB_HCA"]) == ("1", "=m0,m1")
    assert (found["TORCH_NCCL_DUMP_ON_TIMEOUT"], found["TORCH_FR_DUMP_TEMP_FILE"]) == ("0", f"{tmp_path}/a/b/rank")

    environment = {"NCCL_DEBUG": "INFO"}
    monkeypatch.setattr(os, "environ", environment)
    assert network.set_variables(chosen) == ["NCCL_DEBUG=INFO from the environment is used; the configuration sets WARN"]
    assert environment == found | {"NCCL_DEBUG": "INFO"}
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("debug=LOUD", "cluster.debug: expected VERSION, WARN, INFO or TRACE, got LOUD"),
        ("heartbeat=0", "cluster.heartbeat: expected an integer >= 1, got 0"),
        ("flight_recorder=-1", "cluster.flight_recorder: expected an integer >= 0, got -1"),
        ("interfaces=[]", r"cluster.interfaces: expected null or a list of names, got \[\]"),
        ("adapters=['']", r"cluster.adapters: expected null or a list of names, got \[''\]"),
    ],
)
def test_invalid_settings(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(override)


def test_settings_that_do_not_fit_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigCompositionException):
        settings("interfaces=lo")
    with pytest.raises(ConfigError, match=r"cluster\.interfaces: expected lo.* on .*, got eth99"):
        network.set_variables(settings("interfaces=[lo,eth99]"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cluster\.dumps: expected a folder that can be created, got .*file/x \("):
        network.set_variables(settings(f"dumps={tmp_path}/file/x"))


def test_a_missing_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "environ", {"NNODES": "2"})
    with pytest.raises(SystemExit, match="2"):
        node.main([])
    assert capsys.readouterr() == ("", "error: NODE_RANK: expected a value on each of 2 nodes, got nothing\n")


@pytest.mark.parametrize(("code", "cause", "status"), [(2, "status 2", 2), (-9, "signal SIGKILL", 137)])
def test_the_first_failure_is_one_line(
    code: int, cause: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> None:
        assert arguments == ["--signals-to-handle", "SIGQUIT", "--standalone", "-m", "launch.train", "k=1"]
        raise ChildFailedError("launch.train", {3: ProcessFailure(local_rank=1, pid=1, exitcode=code, error_file="")})

    monkeypatch.setattr("torch.distributed.run.main", fail)
    with pytest.raises(SystemExit, match=str(status)):
        agent.run_agent(["--standalone"], "launch.train", ["k=1"])
    assert capsys.readouterr().err == f"process 3 failed first, with {cause}\n"
