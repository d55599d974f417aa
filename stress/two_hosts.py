"""Runs on two hosts with a shared folder: an interrupted link, a second job, and a killed agent.

Run ``python -m stress.two_hosts`` as root. The hosts are two network namespaces of this machine with two processes each, joined by
a virtual network (Linux, iproute2).

The link is interrupted in two ways: one end goes down, or all packets of the second host are lost silently, because they have a
wrong hardware address. Both sides must end by themselves with an error within the timeout. If one host's agent is killed, the
processes of both hosts must end by themselves, too. The same commands must then resume the run to the same weights and metrics as
an uninterrupted run. A second job that starts with the folder of a running one must be refused on both hosts, without effect on
the first.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stress.kill_many import RUN, assert_same, assert_undamaged, results
from stress.network import network, processes, run
from tests.structure import ROOT

ADDRESSES = {"petra-a": "10.98.0.1", "petra-b": "10.98.0.2"}
HOSTS = tuple(ADDRESSES)
END_SECONDS = 15
"""Seconds in addition to trainer.timeout that the processes of a host and torchrun may take to end."""
PATIENCE = 600
"""Seconds that any other step may take."""
INTERRUPTIONS = {
    "down": ("ip link set eth0 down", "ip link set eth0 up"),
    "drop": (
        f"ip neighbour replace {ADDRESSES[HOSTS[0]]} lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
        f"ip neighbour delete {ADDRESSES[HOSTS[0]]} dev eth0",
    ),
}
"""Commands that interrupt and restore the link, on the second host."""


def start(folder: Path, timeout: int, name: str = "") -> list[subprocess.Popen[str]]:
    """Start the run's agents, one per host.

    Args:
        folder: Folder of the run. The agents' output goes to files in it.
        timeout: Value of trainer.timeout.
        name: Start of the names of these files.
    """
    folder.mkdir(exist_ok=True)
    agents = []
    for rank, host in enumerate(HOSTS):
        variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "2", "MASTER_ADDR": ADDRESSES[HOSTS[0]]}
        words = ["ip", "netns", "exec", host, sys.executable, "-m", "launch.node", *RUN]
        words += ["trainer.epochs=20", f"trainer.timeout={timeout}"]
        environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        if name:
            environment["MASTER_PORT"] = "29600"
        with (folder / f"{name}{host}.txt").open("w") as printed:
            agents.append(subprocess.Popen(words, cwd=folder, env=environment, stdout=printed, stderr=printed, text=True))
    return agents


def until_saved(folder: Path, agents: list[subprocess.Popen[str]]) -> None:
    """Wait until a run has written two checkpoints."""
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("run/checkpoints/0*[0-9]"))) < 2:
        assert all(agent.poll() is None for agent in agents), "".join(path.read_text() for path in folder.glob("*.txt"))
        assert time.monotonic() < deadline
        time.sleep(0.02)


def errors(path: Path) -> list[str]:
    """Return the errors in an agent's output."""
    return [line for line in path.read_text().splitlines() if line.startswith(("error: ", "Traceback"))]


def interrupt(folder: Path, how: str, timeout: int) -> None:
    """Start a run, interrupt the link once checkpoints exist, and restore it once both sides have ended."""
    break_, restore = INTERRUPTIONS[how]
    agents = start(folder, timeout)
    until_saved(folder, agents)
    run(break_, HOSTS[1])
    started = time.monotonic()
    try:
        for host, agent in zip(HOSTS, agents, strict=True):
            status = agent.wait(max(0.1, timeout + END_SECONDS - (time.monotonic() - started)))
            print(f"{how}: {host} ended after {time.monotonic() - started:.1f} s with status {status}:", flush=True)
            found = errors(folder / f"{host}.txt")
            print(*(f"  {line}" for line in found), sep="\n", flush=True)
            assert status != 0
            assert len(found) == 1
            assert found[0].startswith("error: ")
    finally:
        run(restore, HOSTS[1])


def refuse_second_job(folder: Path, expected: dict[str, Any]) -> None:
    """Start a second job with the folder of a running one."""
    first = start(folder, 60)
    until_saved(folder, first)
    paused = [pid for host in HOSTS for pid in processes(host)]  # it would end while the second one starts
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    second = start(folder, 60, name="second-")
    assert [agent.wait(PATIENCE) for agent in second] == [2, 2]
    seconds = time.monotonic() - started
    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    for host in HOSTS:
        found = errors(folder / f"second-{host}.txt")
        assert len(found) <= 1, found  # the other host may have reported the error
        assert all("run_dir: expected a folder that no other run uses now, got run, in use by process" in line for line in found)
    found = errors(folder / f"second-{HOSTS[0]}.txt")
    assert [agent.wait(PATIENCE) for agent in first] == [0, 0]
    assert_same(results(folder / "run"), expected, "second job")
    print(f"second job: refused after {seconds:.1f} s; the first ended as if alone\n  {found[0]}", flush=True)


def kill_agent(folder: Path, expected: dict[str, Any]) -> None:
    """Kill the agent of the second host, wait until all processes have ended, and resume."""
    agents = start(folder, 60)
    until_saved(folder, agents)
    before = {pid for host in HOSTS for pid in processes(host)}
    agents[1].kill()
    started = time.monotonic()
    while left := before & {pid for host in HOSTS for pid in processes(host)}:
        assert time.monotonic() < started + END_SECONDS + 60, left
        time.sleep(0.05)
    seconds, status = time.monotonic() - started, agents[0].wait(PATIENCE)
    agents[1].wait()
    assert_undamaged(folder / "run", expected)
    assert [agent.wait(PATIENCE) for agent in start(folder, 60)] == [0, 0]
    assert_same(results(folder / "run"), expected, "killed agent")
    print(f"killed agent: all processes ended after {seconds:.1f} s, the other agent with status {status}; resumed", flush=True)


def main() -> None:
    """Run the whole test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=int, default=10, help="trainer.timeout in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, network("petra-hosts", ADDRESSES):
        folder = Path(name)
        assert [agent.wait(PATIENCE) for agent in start(folder / "uninterrupted", 60)] == [0, 0]
        expected = results(folder / "uninterrupted" / "run")
        refuse_second_job(folder / "second", expected)
        kill_agent(folder / "agent", expected)
        for how in INTERRUPTIONS:
            interrupt(folder / how, how, options.timeout)
            assert_undamaged(folder / how / "run", expected)
            assert [agent.wait(PATIENCE) for agent in start(folder / how, 60)] == [0, 0]
            assert_same(results(folder / how / "run"), expected, how)
            print(f"{how}: resumed to the same weights and metrics once the link was restored", flush=True)


if __name__ == "__main__":
    main()
