"""Hosts on this machine whose links have a limited rate and a delay, as over a wide area. Needs Linux, root and iproute2.

Each host is a network namespace (:mod:`stress.network`), and all are joined by a bridge without limits. Between some pairs, packets
take another way: a TUN device at each end, between which a process carries them. Each packet waits for the end of the one before,
takes size / rate, and arrives ``delay`` later. (``tc`` could limit the rate, but many kernels have no netem for the delay.)
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import shutil
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from stress.network import network, run

MTU = 32_000
"""Bytes of the largest packet. Smaller ones would keep the carriers busier."""
BUFFERS = (
    *("net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_no_metrics_save=1", "net.ipv4.conf.all.rp_filter=0"),
    *("net.ipv4.tcp_rmem=4096 4194304 33554432", "net.ipv4.tcp_wmem=4096 4194304 33554432"),
)
"""Settings of TCP for long distances: no slow start after each pause, and buffers for the data on the way."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass(frozen=True)
class Shape:
    """Properties of both directions of a link.

    Attributes:
        rate: Bytes per second.
        delay: Seconds that a packet travels.
        queue: Seconds of data that wait for the link, at most. Further packets are dropped.
    """

    rate: float
    delay: float
    queue: float = 0.3


class Direction:
    """Times at which the packets of one direction arrive."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._free_from = shape, 0.0

    def arrival(self, size: int, now: float) -> float | None:
        """Return when a packet of ``size`` bytes that is sent ``now`` arrives, or None if it is dropped."""
        if self._free_from - now > self._shape.queue:
            return None
        self._free_from = max(now, self._free_from) + size / self._shape.rate
        return self._free_from + self._shape.delay


@contextmanager
def shaped_network(
    count: int, pairs: Sequence[tuple[int, int]], shape: Shape, name: str = "petra-slow"
) -> Iterator[tuple[list[str], str]]:
    """Create hosts with shaped links between some pairs. Remove all of it at the end.

    Args:
        name: Beginning of the names of hosts. Networks of equal names wait for one another.

    Yields:
        The names of the hosts, which are their namespaces, and the address of the first one.
    """
    addresses = {f"{name}{i}": f"10.97.0.{i + 1}" for i in range(count)}
    hosts, carriers = [*addresses], list[multiprocessing.context.ForkProcess]()
    with network(name, addresses):
        try:
            for host in hosts:
                for setting in BUFFERS:
                    _set(host, setting)
            for number, (a, b) in enumerate(pairs):
                carriers += _link(number, (hosts[a], addresses[hosts[a]]), (hosts[b], addresses[hosts[b]]), shape)
            yield hosts, addresses[hosts[0]]
        finally:
            for carrier in carriers:
                carrier.kill()
                carrier.join()


def _set(host: str, setting: str) -> None:
    name, _, value = setting.partition("=")
    path = "/proc/sys/" + name.replace(".", "/")
    subprocess.run(["ip", "netns", "exec", host, "sh", "-c", f"printf '{value}' > {path}"], check=True)


def _link(number: int, a: tuple[str, str], b: tuple[str, str], shape: Shape) -> list[multiprocessing.context.ForkProcess]:
    """Join two hosts, given by name and address, and return the processes that carry the packets of both directions."""
    ends = []
    for host, _ in (a, b):
        name = f"{host[-6:]}-{number}"
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        run(f"ip link set {name} netns {host}")
        run(f"ip -n {host} link set {name} mtu {MTU} up")
        ends.append(end)
    for own, other in ((a, b), (b, a)):
        run(f"ip -n {own[0]} route add {other[1]}/32 dev {own[0][-6:]}-{number} src {own[1]}")
    context = multiprocessing.get_context("fork")
    carriers = [context.Process(target=carry, args=(ends[i], ends[1 - i], Direction(shape)), daemon=True) for i in (0, 1)]
    for carrier in carriers:
        carrier.start()
    for end in ends:
        os.close(end)
    return carriers


def carry(source: int, target: int, direction: Direction) -> None:
    """Carry packets from one device to the other. Never return."""
    os.nice(-5)  # packets should not wait for processes that compute
    os.set_blocking(source, False)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            os.write(target, waiting.popleft()[1])
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        if not select.select([source], [], [], timeout)[0]:
            continue
        packet = os.read(source, 1 << 16)
        due = direction.arrival(len(packet), time.monotonic())
        if due is not None:
            waiting.append((due, packet))


def missing() -> str:
    """Return what this machine lacks for :func:`shaped_network`; nothing if it can be used."""
    if os.geteuid() != 0:
        return "root"
    if shutil.which("ip") is None:
        return "iproute2"
    name = "petra-slow-probe"
    made = subprocess.run(["ip", "netns", "add", name], stderr=subprocess.DEVNULL).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
    if not made:
        return "network namespaces"
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "/dev/net/tun"
