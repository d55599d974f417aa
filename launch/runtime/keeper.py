"""Remove a folder in memory when the process that owns it has ended: ``python keeper.py PID FOLDER``.

A program of its own that imports only the standard library, so that it needs little memory. It also ends when the folder is gone.
"""

from __future__ import annotations

import os
import select
import shutil
import sys

INTERVAL = 1000
"""Milliseconds between two checks of the folder."""


def keep(owner: int, folder: str) -> None:
    """Wait until ``owner`` has ended or ``folder`` is gone. Then remove the folder."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        pass
    else:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        while os.path.isdir(folder) and not ended.poll(INTERVAL):
            pass
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2])
