"""Interrupt the link between two hosts during a run, and resume the run once the link is restored.

Run ``python -m tests.two_hosts`` as root. The hosts are two network namespaces of this machine with two processes each, joined by a
virtual Ethernet link (Linux, iproute2, nftables). The link is interrupted in two ways: one end goes down, or all packets are
dropped silently. Both sides must end by themselves with an error within the timeout. The same commands must then resume the run to
the same weights and metrics as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.commands import ROOT
from tests.kill_many import RUN, assert_same, assert_undamaged, results

HOSTS = ("petra-a", "petra-b")
ADDRESSES = ("10.98.0.1", "10.98.0.2")
END_SECONDS = 15
"""Seconds in addition to trainer.timeout that the processes of a host and torchrun may take to end."""
PATIENCE = 600
"""Seconds that any other step may take."""
DROP = "table inet interrupt { chain input { type filter hook input priority 0; policy accept; iif eth0 drop; }; }"
INTERRUPTIONS = {
    "down": ("ip link set eth0 down", "ip link set eth0 up"),
    "drop": (f"nft {DROP}", "nft delete table inet interrupt"),
}
"""Commands that interrupt and restore the link, on the second host."""


@contextmanager
def hosts() -> Iterator[None]:
    """Create and join the namespaces. Remove them, with all their processes, at the end."""
    try:
        for host in HOSTS:
            command(f"ip netns add {host}")
        command(f"ip link add eth0 netns {HOSTS[0]} type veth peer name eth0 netns {HOSTS[1]}")
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            command(f"ip -n {host} address add {address}/24 dev eth0")
            for link in ("lo", "eth0"):
                command(f"ip -n {host} link set {link} up")
        yield
    finally:
        for host in HOSTS:
            inside = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split()
            subprocess.run(["kill", "-9", *inside], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)


def command(line: str, host: str | None = None) -> None:
    """Run a command, in a host's namespace if one is given."""
    subprocess.run([*(["ip", "netns", "exec", host] if host else []), *line.split()], check=True)


def start(folder: Path, timeout: int) -> list[subprocess.Popen[str]]:
    """Start the run's agents, one per host. Their output goes to files in ``folder``."""
    folder.mkdir(exist_ok=True)
    agents = []
    for rank, host in enumerate(HOSTS):
        variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "2", "MASTER_ADDR": ADDRESSES[0]}
        words = ["ip", "netns", "exec", host, sys.executable, "-m", "launch.node", *RUN]
        words += ["trainer.epochs=20", "cluster.interfaces=[eth0]", f"trainer.timeout={timeout}"]
        with (folder / f"{host}.txt").open("w") as printed:
            environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            agents.append(subprocess.Popen(words, cwd=folder, env=environment, stdout=printed, stderr=printed, text=True))
    return agents


def interrupt(folder: Path, how: str, timeout: int) -> None:
    """Start a run, interrupt the link once checkpoints exist, and restore it once both sides have ended."""
    break_, restore = INTERRUPTIONS[how]
    agents = start(folder, timeout)
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("run/checkpoints/0*[0-9]"))) < 2:
        assert all(agent.poll() is None for agent in agents)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    command(break_, HOSTS[1])
    started = time.monotonic()
    try:
        for host, agent in zip(HOSTS, agents, strict=True):
            status = agent.wait(max(0.1, timeout + END_SECONDS - (time.monotonic() - started)))
            print(f"{how}: {host} ended after {time.monotonic() - started:.1f} s with status {status}:", flush=True)
            errors = [
                line for line in (folder / f"{host}.txt").read_text().splitlines() if line.startswith(("error: ", "Traceback"))
            ]
            print(*(f"  {line}" for line in errors), sep="\n", flush=True)
            assert status != 0
            assert len(errors) == 1
            assert errors[0].startswith("error: ")
    finally:
        command(restore, HOSTS[1])


def main() -> None:
    """Run the whole test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=int, default=10, help="trainer.timeout in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, hosts():
        folder = Path(name)
        assert [agent.wait(PATIENCE) for agent in start(folder / "uninterrupted", 60)] == [0, 0]
        expected = results(folder / "uninterrupted" / "run")
        for how in INTERRUPTIONS:
            interrupt(folder / how, how, options.timeout)
            assert_undamaged(folder / how / "run", expected)
            assert [agent.wait(PATIENCE) for agent in start(folder / how, 60)] == [0, 0]
            assert_same(results(folder / how / "run"), expected, how)
            print(f"{how}: resumed to the same weights and metrics once the link was restored", flush=True)


if __name__ == "__main__":
    main()
