"""A process with the emulated device, torch and petra imported. It forks the processes of a test, which then start in milliseconds.

``python -m tests.emulated.server SOCKET DEVICES`` listens on a Unix socket until its stdin is closed. For each connection it
forks a process that reads requests and answers each with a line. :mod:`tests.emulated.processes` is its client.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.emulated import device

PRELOADED = [
    "torch._dynamo",
    "matplotlib.figure",
    "pytest",
    "petra",
    "petra.models",
    "petra.training",
    "petra.diagnostics.recorder",
    "launch.train",
]


def main() -> None:
    """Serve connections until stdin is closed."""
    path, devices = sys.argv[1:]
    device.install(device.Options(devices=int(devices)))
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    os.dup2(2, 1)  # what tests print goes to files of their own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes of connections
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
            assert ready == [listener]
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                _serve(connection)
            connection.close()
    os.unlink(path)


def _serve(connection: socket.socket) -> None:
    """Answer requests until the client closes the connection, and exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with connection, connection.makefile("rw") as stream:
            for line in stream:
                print(json.dumps(_run(json.loads(line))), file=stream, flush=True)
    finally:
        os._exit(0)


def _run(request: dict[str, Any]) -> list[int | None]:
    """Fork the processes of a request; return their exit statuses, None for those that were still running at the deadline."""
    folder, world = Path(request["folder"]), request["world"]
    pids = [_fork(rank, world, folder, request) for rank in range(world)]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + request["timeout"]
    while len(statuses) < world and time.monotonic() < deadline:
        for pid in pids:
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
        if any(status for status in statuses.values()) and not request["waits_for_all"]:
            deadline = min(deadline, time.monotonic() + 3)
    for pid in pids:
        if pid not in statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [statuses.get(pid) for pid in pids]


def _fork(rank: int, world: int, folder: Path, request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with open(folder / f"output{rank}.txt", "w", buffering=1) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
        device.configure(device.Options(**request["options"]))
        _call(rank, world, folder, request)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _call(rank: int, world: int, folder: Path, request: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)  # a fork loses torch's pool of threads; threads of autograd would renew it at the same time, and fail
    module, _, name = request["target"].partition(":")
    target = getattr(importlib.import_module(module), name)
    arguments = pickle.loads((folder / "arguments").read_bytes())
    group = world > 1 and not request["environment"]
    if group:
        from tests.emulated.processes import open_group

        open_group(rank, world, folder, request["group_timeout"])
    result = target(*arguments) if world == 1 and not request["environment"] else target(rank, *arguments)
    torch.save(result, folder / f"result{rank}.pt")
    if group:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
