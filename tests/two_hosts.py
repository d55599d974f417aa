"""Cuts the link between two hosts in the middle of a run, and goes on once it is there again.

``python -m tests.two_hosts``, as root. The hosts are two network namespaces of this machine with two processes each, joined by a
virtual cable (Linux, iproute2, nftables). The link is cut twice: one end goes down, and all packets are dropped without a word.
Both sides have to end by themselves with an error within the timeout, and the same commands have to go on to the weights and
metrics of a run that nothing happened to.
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
END = 15
"""Seconds beside trainer.timeout that a side may take to end: that of the processes, and of torchrun around them."""
PATIENCE = 600
DROP = "table inet cut { chain input { type filter hook input priority 0; policy accept; iif eth0 drop; }; }"
CUTS = {
    "down": ("ip link set eth0 down", "ip link set eth0 up"),
    "drop": (f"nft {DROP}", "nft delete table inet cut"),
}
"""What is done on the second host to cut the link and to mend it."""


@contextmanager
def hosts() -> Iterator[None]:
    """The namespaces, joined; nothing of them, nor in them, is left behind."""
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
    subprocess.run([*(["ip", "netns", "exec", host] if host else []), *line.split()], check=True)


def launched(folder: Path, timeout: int) -> list[subprocess.Popen[str]]:
    """The run's agents, one on each host; what they print is in ``folder``."""
    folder.mkdir(exist_ok=True)
    agents = []
    for rank, host in enumerate(HOSTS):
        place = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "2", "MASTER_ADDR": ADDRESSES[0]}
        words = ["ip", "netns", "exec", host, sys.executable, "-m", "launch.node", *RUN]
        words += ["trainer.epochs=20", "cluster.interfaces=[eth0]", f"trainer.timeout={timeout}"]
        with (folder / f"{host}.txt").open("w") as printed:
            environment = {**os.environ, **place, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            agents.append(subprocess.Popen(words, cwd=folder, env=environment, stdout=printed, stderr=printed, text=True))
    return agents


def cut(folder: Path, how: str, timeout: int) -> None:
    """Starts a run, cuts the link once there are checkpoints, and mends it once both sides have ended."""
    break_, mend = CUTS[how]
    agents = launched(folder, timeout)
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("run/checkpoints/0*[0-9]"))) < 2:
        assert all(agent.poll() is None for agent in agents)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    command(break_, HOSTS[1])
    started = time.monotonic()
    try:
        for host, agent in zip(HOSTS, agents, strict=True):
            status = agent.wait(max(0.1, timeout + END - (time.monotonic() - started)))
            print(f"{how}: {host} ended after {time.monotonic() - started:.1f} s with status {status}:", flush=True)
            told = [line for line in (folder / f"{host}.txt").read_text().splitlines() if line.startswith(("error: ", "Traceback"))]
            print(*(f"  {line}" for line in told), sep="\n", flush=True)
            assert status != 0
            assert len(told) == 1
            assert told[0].startswith("error: ")
    finally:
        command(mend, HOSTS[1])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=int, default=10, help="trainer.timeout in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, hosts():
        folder = Path(name)
        assert [agent.wait(PATIENCE) for agent in launched(folder / "whole", 60)] == [0, 0]
        expected = results(folder / "whole" / "run")
        for how in CUTS:
            cut(folder / how, how, options.timeout)
            assert_undamaged(folder / how / "run", expected)
            assert [agent.wait(PATIENCE) for agent in launched(folder / how, 60)] == [0, 0]
            assert_same(results(folder / how / "run"), expected, how)
            print(f"{how}: goes on to the same weights and metrics once the link is mended", flush=True)


if __name__ == "__main__":
    main()
