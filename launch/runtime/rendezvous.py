"""Agreement of all ranks on one start of a run, in a store that outlives restarts.

torchrun keeps its store when it restarts processes, so keys of earlier starts are still there. The agents of several machines may
count restarts differently, so the count can't tell starts apart.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed.distributed_c10d import Store

from petra.errors import CommunicationError

POLL = 0.02
"""Seconds between two looks at the store."""


def agree_on_start(store: Store, rank: int, world: int, timeout: float) -> str:
    """Return a text that is the same on all ranks of one start, and different in each start.

    Every rank announces itself with a number of its own. Rank 0 proposes a list of these numbers, and all ranks whose number is in
    the list confirm it. If a number in the list is from an earlier start, a new one will replace it, and rank 0 proposes again.

    Args:
        store: Store that all ranks share.
        timeout: Seconds to wait for the other ranks.

    Raises:
        CommunicationError: If a rank is missing after ``timeout`` seconds.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(f"rank{rank}", own)
    while time.monotonic() < until:
        if rank == 0:
            _propose(store, world)
        proposal = json.loads(store.get("proposal")) if store.check(["proposal"]) else {"id": "", "ranks": []}
        if own in proposal["ranks"]:
            store.set(f"{proposal['id']} confirmed by {own}", "")
            if store.check([f"{proposal['id']} confirmed by {number}" for number in proposal["ranks"]]):
                store.set(f"{proposal['id']} complete", "")
            if store.check([f"{proposal['id']} complete"]):
                return str(proposal["id"])
        time.sleep(POLL)
    raise CommunicationError(f"starting {world} processes: rank {rank} has waited for {timeout:g} seconds for the others")


def _propose(store: Store, world: int) -> None:
    """Propose the numbers that are in the store now, unless they have been proposed already."""
    keys = [f"rank{rank}" for rank in range(world)]
    if not store.check(keys):
        return
    ranks = [store.get(key).decode() for key in keys]
    if not store.check(["proposal"]) or json.loads(store.get("proposal"))["ranks"] != ranks:
        store.set("proposal", json.dumps({"id": uuid.uuid4().hex, "ranks": ranks}))
