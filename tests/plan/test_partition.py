from itertools import combinations, pairwise, product
from random import Random

import pytest
import torch

from petra import ConfigError
from petra.models import revnet18
from petra.plan.layout import make_layout
from petra.plan.partition import balanced_partition, best_partition
from petra.specs import TensorSpec
from tests.support.nets import RandomSource, mixed_net


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_has_a_cheaper_worst_part(seed: int) -> None:
    random = Random(seed)
    costs = [random.choice([0, 1, random.random() * 10]) for _ in range(random.randint(1, 9))]
    parts = random.randint(1, len(costs))
    found = balanced_partition(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert all(found)
    assert len(found) == parts

    def worst(bounds: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in pairwise((0, *bounds, len(costs))))

    best = min(worst(bounds) for bounds in combinations(range(1, len(costs)), parts - 1))
    assert max(sum(costs[i] for i in part) for part in found) == pytest.approx(best)


def test_more_parts_than_items_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parts: expected an integer from 1 to 2 \(the number of items\), got 3"):
        balanced_partition([1.0, 2.0], 3)


@pytest.mark.parametrize("seed", range(15))
def test_best_partition_against_all_partitions(seed: int) -> None:
    """Costs depend on the part; some are infinite."""
    random = Random(seed)
    items, parts = random.randint(2, 8), random.randint(1, 4)
    parts = min(parts, items)
    costs = {
        (s, e, p): random.choice([random.random(), random.random(), float("inf")])
        for s, e, p in product(range(items), range(1, items + 1), range(parts))
    }

    def worst(bounds: tuple[int, ...]) -> float:
        return max(costs[s, e, p] for p, (s, e) in enumerate(pairwise((0, *bounds, items))))

    best = min(worst(bounds) for bounds in combinations(range(1, items), parts - 1))
    if best == float("inf"):
        with pytest.raises(ConfigError, match="no partition into"):
            best_partition(items, parts, lambda s, e, p: costs[s, e, p])
    else:
        found = best_partition(items, parts, lambda s, e, p: costs[s, e, p])
        assert max(costs[r.start, r.stop, p] for p, r in enumerate(found)) == best


def test_layout_is_contiguous_and_leaves_superfluous_processes_empty() -> None:
    layout = make_layout(mixed_net(), RandomSource().spec, stages=[1, 2, 1, 2], processes=5)
    assert layout.stages == (range(0, 1), range(1, 3), range(3, 4), range(4, 6))
    assert layout.processes[4] == range(0)
    assert [j for stages in layout.processes for j in stages] == [0, 1, 2, 3]


def test_stages_balance_flops() -> None:
    spec = TensorSpec((8, 3, 32, 32), torch.float32)
    layout = make_layout(revnet18(width=0.25), spec, stages=2, processes=1)
    halves = [sum(layout.profiles[b].flops for b in blocks) for blocks in layout.stages]
    assert max(halves) < 0.6 * sum(halves)


def test_more_processes_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="processes: expected 1 to 6, since mixed has 6 blocks, got 7"):
        make_layout(mixed_net(), RandomSource().spec, stages=None, processes=7)
