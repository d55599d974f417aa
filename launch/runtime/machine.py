"""What this machine offers a process: cores, and addresses of host names."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

from petra.errors import invalid

CGROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""The control groups of this process, and where they are mounted."""
INTERFACES = "GLOO_SOCKET_IFNAME"
"""Variable with the network interfaces that gloo uses."""
LOOPBACK = "127.0.0.1"
SECONDS, PATIENCE = 5.0, 300.0
"""Time that a look-up of a host name may take, and time to repeat it: a Kubernetes pod has a name as soon as it runs."""


def available_cores() -> int:
    """Return the number of cores that this process may use, at least 1: those of its affinity, up to the quota of its container."""
    return min([len(os.sched_getaffinity(0)), *(max(1, int(quota)) for quota in _quotas())])


def available_memory() -> int:
    """Return the memory of the machine in bytes, up to the limit of this process's control groups."""
    limits = [int(text) for text in _settings("memory", "memory.limit_in_bytes", "memory.max") if text.isdecimal()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def _quotas() -> Iterator[float]:
    """Yield the quotas of CPU time of this process's control groups in cores."""
    quotas, periods = (_settings("cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    pairs = [*zip(quotas, periods, strict=False), *(text.split() for text in _settings("cpu", None, "cpu.max"))]
    with suppress(ValueError):
        yield from (float(quota) / float(period) for quota, period in pairs if quota not in ("max", "-1"))


def _settings(controller: str, first: str | None, second: str | None = None) -> Iterator[str]:
    """Yield the contents of a file of this process's control groups and those around them.

    Inside a container, the path of a group may be that of the host, while the mounted folder is that of the container.

    Args:
        controller: Name of the controller.
        first, second: Name of the file in cgroup v1, and in v2; None for none.
    """
    try:
        lines = CGROUPS.read_text().splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        name = first if controllers else second
        if name is None or (controllers and controller not in controllers.split(",")):
            continue
        own = Path(path.lstrip("/"))
        mounts = (controller, controllers) if controllers else ("", "unified")
        for mount, group in product(mounts, (own, *own.parents)):
            with suppress(OSError):  # no such file
                yield (MOUNT / mount / group / name).read_text().strip()


def limit_threads() -> None:
    """Let torch use no more threads than the quota allows: it counts cores without the quota. OMP_NUM_THREADS has precedence."""
    if "OMP_NUM_THREADS" not in os.environ and (cores := available_cores()) < len(os.sched_getaffinity(0)):
        os.environ["OMP_NUM_THREADS"] = str(cores)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(cores)


def address_of(name: str) -> str | None:
    """Return the address of a host name, or None if it does not resolve within some seconds."""
    found = list[str]()

    def look_up() -> None:
        with suppress(OSError, UnicodeError):
            found.append(str(socket.getaddrinfo(name, None)[0][4][0]))

    thread = Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return found[0] if found else None


def wait_for_address(name: str, variable: str) -> None:
    """Wait until a host name resolves. A warning says so after the first look-up.

    Raises:
        ConfigError: If it does not in :data:`PATIENCE` seconds.
    """
    end, warned = monotonic() + PATIENCE, False
    while address_of(name) is None:
        if monotonic() > end:
            raise invalid(variable, "a host name that resolves, or an address", name)
        if not warned:
            print(
                f"warning: {variable}: {name} does not resolve; waiting for it up to {PATIENCE:.0f} s", file=sys.stderr, flush=True
            )
        warned = True
        sleep(min(1.0, PATIENCE))


def check_names(one_machine: bool, *, warns: bool) -> None:
    """Warn of a name over which processes of other machines can't reach this one, before they try.

    Processes of one machine meet over the loopback interface if its name does not resolve.
    """
    if not one_machine:
        remote = not os.environ.get("MASTER_ADDR", "").startswith("127.")
        if warns and remote and (problem := unreachable()) is not None:
            print(f"warning: {problem}", file=sys.stderr, flush=True)
        return
    if address_of(os.environ.get("MASTER_ADDR", LOOPBACK)) is None:
        os.environ["MASTER_ADDR"] = LOOPBACK
    if address_of(socket.gethostname()) is None and sys.platform == "linux":
        os.environ.setdefault(INTERFACES, "lo")


def unreachable() -> str | None:
    """Return why processes of other machines can't reach this one over gloo, or None."""
    name = socket.gethostname()
    if INTERFACES in os.environ or not (address := address_of(name) or "no address").startswith(("127.", "::1", "no ")):
        return None
    return f"{name} resolves to {address}, which other nodes can't reach: set {INTERFACES}"
