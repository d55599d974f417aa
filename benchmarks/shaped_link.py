"""A link between two network namespaces with limited rate, delay and loss, as over a wide area. Needs root and Linux.

Where the kernel has netem, the link is a virtual Ethernet cable with ``tc qdisc add ... netem``. Elsewhere, a process for each
direction carries the packets between two TUN devices, by the same rules: each packet waits for the end of the one before, takes
size / rate, and arrives ``delay`` later, or is dropped.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import select
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HOSTS = ("petra-wan-a", "petra-wan-b")
ADDRESSES = ("10.96.0.1", "10.96.0.2")
DEVICE = "eth0"
QUEUE = 16 << 20
"""Bytes that wait for the link in one direction, at most. Further packets are dropped."""
SETTINGS = (
    *("net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_no_metrics_save=1"),
    *("net.ipv4.tcp_rmem=4096 4194304 67108864", "net.ipv4.tcp_wmem=4096 4194304 67108864"),
)
"""Settings of TCP for long distances: no slow start after each pause, and buffers for the data on the way."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass(frozen=True)
class Shape:
    """Properties of both directions of a link.

    Attributes:
        rate: Bytes per second.
        delay: Seconds that a packet travels.
        loss: Probability that a packet is lost.
        mtu: Size of the largest packet in bytes.
        congestion: TCP's congestion control, one of net.ipv4.tcp_allowed_congestion_control; None for this machine's.
    """

    rate: float
    delay: float
    loss: float = 0.0
    mtu: int = 9000
    congestion: str | None = None


class Direction:
    """Times at which the packets of one direction arrive.

    Args:
        shape: Properties of the link.
        seed: Seed of the losses.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self._shape, self._chance, self._free_from = shape, random.Random(seed), 0.0

    def arrival(self, size: int, now: float) -> float | None:
        """Return when a packet of ``size`` bytes that is sent ``now`` arrives, or None if it is lost."""
        waiting = max(0.0, self._free_from - now) * self._shape.rate
        if waiting + size > QUEUE:
            return None
        self._free_from = max(now, self._free_from) + size / self._shape.rate
        return None if self._chance.random() < self._shape.loss else self._free_from + self._shape.delay


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """Wait until no other process of this machine is in this context. Its programs use the same names of namespaces and devices."""
    with Path(tempfile.gettempdir(), f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def shaped_link(shape: Shape) -> Iterator[str]:
    """Create the two namespaces of :data:`HOSTS` and the link between their devices. Remove all of it at the end.

    If another process of this machine has such a link, wait for its end.

    Yields:
        ``netem`` or ``TUN``: what shapes the link.
    """
    carriers: list[multiprocessing.Process] = []
    with only_one("petra-shaped-link"):
        _remove()
        try:
            for host in HOSTS:
                _run("ip", "netns", "add", host)
            kind = "netem" if _has_netem() else "TUN"
            if kind == "netem":
                _cable(shape)
            else:
                carriers = _carriers(shape)
            for host, address in zip(HOSTS, ADDRESSES, strict=True):
                _configure(host, address, shape)
            yield kind
        finally:
            for carrier in carriers:
                carrier.kill()
                carrier.join()
            _remove()


def _configure(host: str, address: str, shape: Shape) -> None:
    """Set up a namespace's devices and TCP."""
    _run("ip", "-n", host, "address", "add", f"{address}/24", "dev", DEVICE)
    for device in ("lo", DEVICE):
        _run("ip", "-n", host, "link", "set", device, "up")
    _run("ip", "-n", host, "link", "set", DEVICE, "mtu", str(shape.mtu))
    chosen = () if shape.congestion is None else (f"net.ipv4.tcp_congestion_control={shape.congestion}",)
    for setting in (*SETTINGS, *chosen):
        _run("ip", "netns", "exec", host, "sysctl", "--quiet", setting)


def _has_netem() -> bool:
    words = ["ip", "netns", "exec", HOSTS[0], "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    found = subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0
    if found:
        _run("ip", "netns", "exec", HOSTS[0], "tc", "qdisc", "delete", "dev", "lo", "root")
    return found


def _cable(shape: Shape) -> None:
    """Join the namespaces by a virtual Ethernet cable, shaped at both ends."""
    _run("ip", "link", "add", DEVICE, "netns", HOSTS[0], "type", "veth", "peer", "name", DEVICE, "netns", HOSTS[1])
    for host in HOSTS:
        words = ["tc", "-n", host, "qdisc", "add", "dev", DEVICE, "root", "netem"]
        words += ["delay", f"{shape.delay * 1e3}ms", "loss", f"{shape.loss:%}", "rate", f"{8 * shape.rate:.0f}bit"]
        _run(*words, "limit", str(QUEUE // shape.mtu))


def _carriers(shape: Shape) -> list[multiprocessing.Process]:
    """Make a TUN device for each namespace, and start a process for each direction."""
    ends = []
    for i, host in enumerate(HOSTS):
        name = f"petra-tun{i}"
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        _run("ip", "link", "set", name, "netns", host, "name", DEVICE)
        ends.append(end)
    context = multiprocessing.get_context("fork")
    carriers = [context.Process(target=carry, args=(ends[i], ends[1 - i], Direction(shape, i))) for i in (0, 1)]
    for carrier in carriers:
        carrier.start()
    for end in ends:
        os.close(end)
    return carriers  # type: ignore[return-value]


def carry(source: int, target: int, direction: Direction) -> None:
    """Carry packets from one device to the other. Never return."""
    os.set_blocking(source, False)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            try:
                os.write(target, waiting.popleft()[1])
            except OSError:  # the device is not up yet
                continue
        timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        if not select.select([source], [], [], timeout)[0]:
            continue
        try:
            packet = os.read(source, 1 << 16)
        except OSError:
            time.sleep(0.01)
            continue
        due = direction.arrival(len(packet), time.monotonic())
        if due is not None:
            waiting.append((due, packet))


def _remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
