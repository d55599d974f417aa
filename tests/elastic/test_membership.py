"""Which of two replicas remains: processes of both ask at the same time, in threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from petra.elastic.liveness import Liveness
from petra.elastic.membership import Membership
from petra.errors import CommunicationError

REPLICAS, PROCESSES = 2, 2


@pytest.fixture
def members() -> Iterator[list[list[Membership]]]:
    """Yield the memberships of each process of each replica, in the same generation."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port

    def join(rank: int) -> Membership:
        replica, process = divmod(rank, PROCESSES)
        liveness = Liveness("127.0.0.1", port, "run", f"replica {replica}", process, PROCESSES, 20)
        membership = Membership(replica, REPLICAS, liveness)
        membership.join()
        return membership

    with ThreadPoolExecutor(REPLICAS * PROCESSES) as threads:
        found = list(threads.map(join, range(REPLICAS * PROCESSES)))
    yield [found[:PROCESSES], found[PROCESSES:]]
    del store  # until here, it has served them


def test_a_process_of_a_lost_replica_does_not_exclude_the_other_replica(members: list[list[Membership]]) -> None:
    """The first process of replica 1 has died, and the second asks first."""
    assert members[0][0].remaining("group of process 0", [0, 1]) == [0]
    with pytest.raises(CommunicationError, match="replica 2: excluded"):
        members[1][1].remaining("group of process 1", [0, 1])
    assert members[0][1].remaining("group of process 1", [0, 1]) == [0]


def test_all_processes_of_two_replicas_agree_on_the_one_that_remains(members: list[list[Membership]]) -> None:
    """Also if no replica has been declared lost when they ask, as after the loss of a link."""
    members[1][0].liveness.declare_lost = lambda incarnation: None  # type: ignore[method-assign]
    assert members[1][0].remaining("group of process 0", [0, 1]) == [1]
    with pytest.raises(CommunicationError, match="replica 1: excluded"):
        members[0][1].remaining("group of process 1", [0, 1])
    assert members[1][1].remaining("group of process 1", [0, 1]) == [1]
