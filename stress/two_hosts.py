"""Runs on two hosts with a shared folder: an interrupted link, a second job, and a killed agent.

Run ``python -m stress.two_hosts`` as root. The hosts are two network namespaces of this machine with two processes each, joined by
a virtual network (Linux, iproute2).

The link is interrupted in two ways: one end goes down, or all packets of the second host are lost silently, because they have a
wrong hardware address. Both sides must end by themselves with an error within the timeout. If one host's agent is killed, the
processes of both hosts must end by themselves, too. The same commands must then resume the run to the same weights and metrics as
an uninterrupted run. A second job that starts with the folder of a running one must be refused on both hosts, without effect on
the first.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from stress.frame import PATIENCE, RUN, assert_same, assert_undamaged, parser_of, results, saved, until
from stress.network import network, processes, run
from tests.support.processes import environment

ADDRESSES = {"petra-a": "10.98.0.1", "petra-b": "10.98.0.2"}
HOSTS = tuple(ADDRESSES)
END_SECONDS = 15
"""Seconds in addition to trainer.timeout that the processes of a host and torchrun may take to end."""
INTERRUPTIONS = {
    "agent": None,
    "down": ("ip link set eth0 down", "ip link set eth0 up"),
    "drop": (
        f"ip neighbour replace {ADDRESSES[HOSTS[0]]} lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
        f"ip neighbour delete {ADDRESSES[HOSTS[0]]} dev eth0",
    ),
}
"""Commands that interrupt and restore the link, on the second host; None: the second host's agent is killed."""
Agents = list[subprocess.Popen[str]]


def start(folder: Path, timeout: int, name: str = "") -> Agents:
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
        variables |= {"GLOO_SOCKET_IFNAME": "eth0", **({"MASTER_PORT": "29600"} if name else {})}
        words = ["ip", "netns", "exec", host, sys.executable, "-m", "petra", "node", *RUN]
        words += ["trainer.epochs=20", f"trainer.timeout={timeout}"]
        with (folder / f"{name}{host}.txt").open("w") as printed:
            agents.append(
                subprocess.Popen(words, cwd=folder, env=environment(**variables), stdout=printed, stderr=printed, text=True)
            )
    return agents


def started(folder: Path, timeout: int) -> Agents:
    """Start a run, and wait until it has written two checkpoints."""
    agents = start(folder, timeout)

    def output() -> str:
        return "".join(path.read_text() for path in folder.glob("*.txt"))

    def reached() -> bool:
        assert all(agent.poll() is None for agent in agents), output()
        return saved(folder / "run")

    until(reached, output)
    return agents


def finish(agents: Agents, folder: Path, expected: dict[str, Any]) -> None:
    """Wait until a run has ended with the results of the uninterrupted one."""
    assert [agent.wait(PATIENCE) for agent in agents] == [0, 0]
    assert_same(folder / "run", expected)


def errors(path: Path) -> list[str]:
    """Return the errors in an agent's output."""
    return [line for line in path.read_text().splitlines() if line.startswith(("error: ", "Traceback"))]


def all_processes() -> set[int]:
    return {pid for host in HOSTS for pid in processes(host)}


def interrupt(folder: Path, how: str, timeout: int, expected: dict[str, Any]) -> None:
    """Interrupt a run, wait until both sides have ended, restore the link, and resume."""
    commands = INTERRUPTIONS[how]
    timeout = timeout if commands else 60
    agents = started(folder, timeout)
    before, begun = all_processes(), time.monotonic()
    try:
        if commands:
            run(commands[0], HOSTS[1])
        else:
            agents[1].kill()
        until(lambda: not before & all_processes(), lambda: before & all_processes(), seconds=timeout + END_SECONDS)
    finally:
        if commands:
            run(commands[1], HOSTS[1])
    statuses = [agent.wait(PATIENCE) for agent in agents]
    print(f"{how}: all ended within {time.monotonic() - begun:.1f} s, with statuses {statuses}", flush=True)
    for host, status in zip(HOSTS, statuses, strict=True):
        found = errors(folder / f"{host}.txt")
        print(*(f"  {line}" for line in found), sep="\n", flush=True)
        assert status != 0
        assert commands is None or [line[:7] for line in found] == ["error: "]
    assert_undamaged(folder / "run", expected)
    finish(start(folder, 60), folder, expected)
    print(f"{how}: resumed to the same weights and metrics", flush=True)


def refuse_second_job(folder: Path, expected: dict[str, Any]) -> None:
    """Start a second job with the folder of a running one."""
    first = started(folder, 600)  # longer than the second job takes to start on a busy machine
    paused = all_processes()  # it would end while the second one starts
    for pid in paused:
        os.kill(pid, signal.SIGSTOP)
    second = start(folder, 60, name="second-")
    assert [agent.wait(PATIENCE) for agent in second] == [2, 2]
    for pid in paused:
        os.kill(pid, signal.SIGCONT)
    found = [errors(folder / f"second-{host}.txt") for host in HOSTS]
    assert found[0]
    for lines in found:
        assert len(lines) <= 1, lines  # the other host may have reported the error
        assert all("run_dir: expected a folder that no other run uses now, got run, in use by process" in line for line in lines)
    finish(first, folder, expected)
    print(f"second job: refused; the first ended as if alone\n  {found[0][0]}", flush=True)


def main() -> None:
    """Run the whole test."""
    parser = parser_of(__doc__)
    parser.add_argument("--timeout", type=int, default=10, help="trainer.timeout in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, network("petra-hosts", ADDRESSES):
        folder = Path(name)
        assert [agent.wait(PATIENCE) for agent in start(folder / "uninterrupted", 60)] == [0, 0]
        expected = results(folder / "uninterrupted" / "run")
        refuse_second_job(folder / "second", expected)
        for how in INTERRUPTIONS:
            interrupt(folder / how, how, options.timeout, expected)


if __name__ == "__main__":
    main()
