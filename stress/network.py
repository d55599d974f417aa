"""Hosts on this machine, each a network namespace, joined by a bridge. Needs Linux, root and iproute2."""

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def network(bridge: str, addresses: Mapping[str, str], own: str | None = None) -> Iterator[None]:
    """Create hosts that find each other by their names. Remove them, with all their processes, at the end.

    If another process of this machine has a network with this bridge, wait for its end.

    Args:
        bridge: Name of the bridge.
        addresses: Address of each host.
        own: Address of this machine in the network.
    """
    with Path(tempfile.gettempdir(), f"{bridge}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _remove(bridge, addresses)  # of a test that was killed
        try:
            _make(bridge, addresses, own)
            yield
        finally:
            _remove(bridge, addresses)


def run(line: str, host: str | None = None) -> None:
    """Run a command, in a host's namespace if one is given."""
    subprocess.run([*(["ip", "netns", "exec", host] if host else []), *line.split()], check=True)


def processes(host: str) -> list[int]:
    """Return the processes of a host."""
    return [int(pid) for pid in subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split()]


def end_processes(host: str) -> None:
    """Kill all processes of a host."""
    if pids := processes(host):
        subprocess.run(["kill", "-9", *map(str, pids)], stderr=subprocess.DEVNULL)


def _make(bridge: str, addresses: Mapping[str, str], own: str | None) -> None:
    names = "127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in addresses.items())
    run(f"ip link add {bridge} type bridge")
    run(f"ip link set {bridge} up")
    if own is not None:
        run(f"ip address add {own}/24 dev {bridge}")
    for host, address in addresses.items():
        place = Path("/etc/netns", host)  # `ip netns exec` mounts this folder's files over those of /etc
        place.mkdir(parents=True, exist_ok=True)
        (place / "hosts").write_text(names)
        run(f"ip netns add {host}")
        run(f"ip link add {host} type veth peer name eth0 netns {host}")
        run(f"ip link set {host} master {bridge} up")
        run(f"ip -n {host} address add {address}/24 dev eth0")
        for link in ("lo", "eth0"):
            run(f"ip -n {host} link set {link} up")


def _remove(bridge: str, hosts: Collection[str]) -> None:
    for host in hosts:
        end_processes(host)
        subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)
        shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)
    subprocess.run(["ip", "link", "delete", bridge], stderr=subprocess.DEVNULL)
