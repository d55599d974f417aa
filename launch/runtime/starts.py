"""Agreement of all ranks on one start of a run. torchrun keeps its store across restarts, so it also has keys of earlier starts."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

POLL = 0.02
"""Seconds between two looks of rank 0 at the store."""


def agree_on_start(store: Store, rank: int, world: int, limit: timedelta) -> str:
    """Return a name for this start of the run. It is the same on all ranks and differs from the name of any other start.

    TORCHELASTIC_RESTART_COUNT is no such name: the agents of several machines count the restarts of their own processes, so the
    counts differ after a failure that not every agent has seen.

    Each rank announces a random name of its own. Rank 0 answers every name that it finds with its own name, also those of processes
    that have ended, until the process that announced the last name of each rank has acknowledged the answer.

    Args:
        store: Store that all ranks share.
        rank: Rank of this process.
        world: Number of processes.
        limit: Time to wait for the other ranks.

    Raises:
        torch.distributed.DistStoreError: If another rank does not start in time.
    """
    me = secrets.token_hex(8)
    if rank > 0:
        store.set(f"name_of_{rank}", me)
        store.wait([f"start_of_{me}"], limit)
        start = store.get(f"start_of_{me}").decode()
        store.set(f"{me}_in_{start}", "")
        return start
    if world == 1:
        return me
    keys = [f"name_of_{other}" for other in range(1, world)]
    deadline = time.monotonic() + limit.total_seconds()
    store.wait(keys, limit)
    answered: set[str] = set()
    while True:
        names = [store.get(key).decode() for key in keys]
        for name in set(names) - answered:
            store.set(f"start_of_{name}", me)
        answered |= {*names}
        acknowledged = [f"{name}_in_{me}" for name in names]
        if store.check(acknowledged):
            return me
        if time.monotonic() > deadline:
            store.wait(acknowledged, timedelta(milliseconds=1))  # raises
        time.sleep(POLL)
