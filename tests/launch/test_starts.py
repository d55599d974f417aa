"""Agreement of ranks on one start of a run, with a store that keeps what earlier starts wrote."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from launch.runtime.rank import agree_on_start

LIMIT = timedelta(seconds=20)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_ranks_agree_and_every_start_has_another_name(world: int) -> None:
    store, names = dist.HashStore(), list[str]()
    for late in range(world):  # starts after the others
        with ThreadPoolExecutor(world) as pool:
            early = [pool.submit(agree_on_start, store, rank, world, LIMIT) for rank in range(world) if rank != late]
            results = [agree_on_start(store, late, world, LIMIT), *(future.result() for future in early)]
        assert len(set(results)) == 1
        names.append(results[0])
    assert len(set(names)) == world


def test_processes_that_have_ended_do_not_count() -> None:
    """Ranks 1 and 2 announce themselves and end. Rank 0 waits for their successors."""
    store = dist.HashStore()
    for rank in (1, 2):
        with pytest.raises(dist.DistStoreError):
            agree_on_start(store, rank, 3, timedelta(milliseconds=50))
    with ThreadPoolExecutor(3) as pool:
        ranks: list[Future[str]] = [pool.submit(agree_on_start, store, rank, 3, LIMIT) for rank in (0, 1)]
        with pytest.raises(TimeoutError):
            ranks[0].result(timeout=0.3)
        ranks.append(pool.submit(agree_on_start, store, 2, 3, LIMIT))
        assert len({rank.result() for rank in ranks}) == 1


def test_a_rank_that_does_not_start_is_an_error() -> None:
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError):
        agree_on_start(store, 0, 2, timedelta(milliseconds=50))
    store.set("name_of_1", "ended")
    with pytest.raises(dist.DistStoreError):
        agree_on_start(store, 0, 2, timedelta(milliseconds=50))
