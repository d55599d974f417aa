"""What a machine offers: cores under the quota of a container, and host names that don't resolve."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launch import node
from launch.cli import main
from launch.doctor.machine import inspect_machine
from launch.runtime import agent
from launch.runtime.rank import Process
from tests.support.commands import ALONE, refused

CPU = torch.device("cpu")
V1 = "3:cpuset:/\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
V2 = "0::/user.slice/run.scope\n"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that gives this process control groups: the contents of files by path. The machine has eight cores."""
    read = Path.read_text
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})

    def pretend(files: dict[str, str]) -> None:
        def found(path: Path, *arguments: object, **options: object) -> str:
            if not str(path).startswith(("/sys/fs/cgroup", "/proc/self/cgroup")):
                return read(path, *arguments, **options)  # type: ignore[arg-type]
            if str(path) not in files:
                raise FileNotFoundError(path)
            return files[str(path)]

        monkeypatch.setattr(Path, "read_text", found)

    return pretend


def v1(quota: int, folder: str = "cpu") -> dict[str, str]:
    return {f"/sys/fs/cgroup/{folder}/cpu.cfs_quota_us": f"{quota}\n", f"/sys/fs/cgroup/{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/user.slice/run.scope/cpu.max": "250000 100000\n"}, 2),
        ({"/proc/self/cgroup": V2, "/sys/fs/cgroup/user.slice/cpu.max": "50000 100000\n", "/sys/fs/cgroup/cpu.max": "max 1"}, 1),
        ({"/proc/self/cgroup": "0::/../..\n", "/sys/fs/cgroup/cpu.max": "1600000 100000\n"}, 8),  # more than the affinity
        ({"/proc/self/cgroup": V1, **v1(300_000)}, 3),  # a container that mounts its own group
        ({"/proc/self/cgroup": V1, **v1(300_000, "cpu,cpuacct/docker/abc")}, 3),
        ({"/proc/self/cgroup": V1, **v1(-1, "cpu/docker/abc"), **v1(400_000, "cpu/docker")}, 4),
        ({"/proc/self/cgroup": V1, **v1(-1)}, 8),
        ({"/proc/self/cgroup": f"1:cpu:/\n{V2}", **v1(-1), "/sys/fs/cgroup/unified/cpu.max": "200000 100000\n"}, 2),
    ],
)
def test_the_quota_of_a_container_counts(
    files: dict[str, str], cores: int, groups: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the doctor, for the number of processes, and for torch's threads."""
    groups(files)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    found = inspect_machine(ALONE, CPU)
    assert found.cores == cores
    slow = [f"{cores} core(s) for 1 process(es) with 8 thread(s) each: stages slow each other down"] if cores < 8 else []
    assert [problem for problem in found.problems if "core" in problem] == slow
    started = list[list[str]]()
    monkeypatch.setattr(node, "run_agent", lambda flags, name, words: started.append(list(flags)))
    monkeypatch.setattr(node, "stop_before_start", lambda: None)
    monkeypatch.setattr(os, "environ", {"PATH": "", "NPROC_PER_NODE": "cpu"})
    node.main(["k=1"])
    assert started[0][started[0].index("--nproc-per-node") + 1] == str(cores)
    threads = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with agent.this_process():
        assert os.environ.get("OMP_NUM_THREADS") == (str(cores) if cores < 8 else None)
    assert threads == ([cores] if cores < 8 else [])


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": V2, "/sys/fs/cgroup/user.slice/memory.max": "1073741824\n", "/sys/fs/cgroup/memory.max": "max\n"},
        {"/proc/self/cgroup": "4:memory:/docker/abc\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n"},
    ],
)
def test_the_memory_of_a_container_counts(files: dict[str, str], groups: Callable[[dict[str, str]], None]) -> None:
    groups(files)
    assert inspect_machine(ALONE, CPU).memory == 2**30


def unknown(*arguments: object) -> list[object]:
    raise socket.gaierror(-2, "Name or service not known")


def test_a_host_name_that_does_not_resolve_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The agent waits for it, since a pod may not run yet, and says so; the doctor says it before the processes connect."""
    started, waits = list[list[str]](), list[float]()
    monkeypatch.setattr(node, "run_agent", lambda flags, name, words: started.append(list(flags)))
    monkeypatch.setattr(node, "stop_before_start", lambda: None)
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first.invalid", "NPROC_PER_NODE": "1"}
    monkeypatch.setattr(os, "environ", {"PATH": "", **variables})
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            monkeypatch.setattr(socket, "getaddrinfo", resolve)
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            monkeypatch.setattr("launch.runtime.machine.address_of", lambda name: "127.0.0.1")

    monkeypatch.setattr("launch.runtime.machine.sleep", wait)
    node.main(["k=1"])
    warning = "warning: MASTER_ADDR: first.invalid does not resolve; waiting for it up to 300 s\n"
    assert (len(waits), len(started), capfd.readouterr().err) == (3, 1, warning)
    monkeypatch.undo()

    monkeypatch.setattr(os, "environ", {"PATH": "", **variables})
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("launch.runtime.machine.PATIENCE", 0.0)
    monkeypatch.setattr(node, "stop_before_start", lambda: None)
    monkeypatch.setattr("launch.runtime.machine.print", lambda *words, **options: None, raising=False)
    assert refused(node.main, ["k=1"]) == "MASTER_ADDR: expected a host name that resolves, or an address, got first.invalid"


def test_processes_of_several_machines_say_that_they_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Joined(Exception):
        pass

    def join(*arguments: object, **options: object) -> None:
        raise Joined

    monkeypatch.setattr(os, "environ", {"PATH": "", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"})
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "rendezvous", join)
    with pytest.raises(Joined), Process(2, 4, 0, 2).process_group(CPU, 60.0):
        pass
    expected = f"warning: {socket.gethostname()} resolves to no address, which other nodes can't reach: set GLOO_SOCKET_IFNAME\n"
    assert capsys.readouterr().err == expected


def test_processes_of_one_machine_need_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that petra starts get the address of the loopback interface, and those of torchrun take it."""
    flags = list[list[str]]()
    monkeypatch.setattr(agent, "run_agent", lambda *arguments: flags.append(list(arguments[0])))
    monkeypatch.setattr(sys, "argv", ["petra"])
    main(["doctor", "--nproc", "2"])
    monkeypatch.setattr(node, "run_agent", lambda *arguments: flags.append(list(arguments[0])))
    monkeypatch.setattr(node, "stop_before_start", lambda: None)
    monkeypatch.setattr(os, "environ", {"PATH": "", "NPROC_PER_NODE": "2"})
    node.main([])
    assert flags == [["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]] * 2

    from launch.runtime.machine import check_names

    resolve = socket.getaddrinfo
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "nameless"})
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest: resolve(name, *rest) if name == "127.0.0.1" else unknown())
    check_names(True, warns=True)
    assert os.environ == {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
