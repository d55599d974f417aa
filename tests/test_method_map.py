"""The map of methods: three cells of each map recalculated from the shapes of the networks, without the planner."""

import json
from functools import cache

import pytest

from benchmarks.method_map import EXACT, EXACT_NAMES, LATE, NAMES, PETRA, REVERSIBLE, SIZES, TERAFLOPS, winner
from benchmarks.records import RECORDS

K, T, V = 64, 4096, 32_000
CELLS = json.loads((RECORDS / "method_map.json").read_text(encoding="utf-8"))


@cache
def forwards(size: str, streams: int) -> list[float]:
    """Return the FLOPs of a forward of each layer and of the head, for one sequence."""
    width, layers, *_ = SIZES[size]
    return [2.0 * T * layer_weights(size) + 4 * T * T * width] * layers + [2.0 * T * streams * width * V]


def layer_weights(size: str) -> int:
    """Queries, keys and values of 8 heads, output, and SwiGLU."""
    width, _, heads, hidden, _ = SIZES[size]
    return 2 * width * width + 2 * 8 * (width // heads) * width + 3 * width * hidden


@cache
def slowest(size: str, streams: int) -> float:
    """Return the FLOPs of a forward of the slowest device in the most equal partition into consecutive layers."""
    blocks, parts = forwards(size, streams), SIZES[size][4]
    low, high = max(blocks), sum(blocks)
    while high - low > 1e-9 * high:
        limit, used, load = (low + high) / 2, 1, 0.0
        for block in blocks:
            used, load = (used + 1, block) if load + block > limit * (1 + 1e-12) else (used, load + block)
        low, high = (low, limit) if used <= parts else (limit, high)
    return high


def by_hand(size: str, teraflops: int, bandwidth: float, fsdp: int) -> dict[str, float]:
    """Return seconds per microbatch with plenty of memory, so that a device computes 3 forwards per microbatch.

    Without a flush, a pipeline is as fast as its slowest device, its links, or the way of a microbatch to the last of p devices and
    back, on which 2 (p − 1) + 1 are in flight with d = 2. 1F1B has p in flight, and fills and drains in p − 1 steps more, of which
    V-Half saves a half, V-Min a third and ZB-H1, whose third part of the work waits for nobody, two thirds. FSDP moves 6 bytes per
    parameter and pass of k / p sequences, and computes ``fsdp`` forwards: 3 with stored graphs, 4 with stored inputs.
    """
    width, layers, *_, p = SIZES[size]
    flops, link, hops = 1e12 * teraflops, 1e9 * bandwidth, 2 * (p - 1)
    found, flush = dict[str, float](), (K + p - 1) / K

    def flushed(step: float, mean: float, message: float) -> float:
        return max(step + ((p - 1) * mean + hops * message) / K, flush * (mean + hops * message / p))

    for streams, late, exact in ((2, PETRA, REVERSIBLE), (1, LATE, EXACT)):
        step, message = 3 * slowest(size, streams) / flops, 2 * T * width * streams / link
        mean = 3 * sum(forwards(size, streams)) / flops / p
        found[late] = max(step, message, (hops * message + p * mean) / (hops + 1))
        found[exact] = flushed(step, mean, message)
    found["ZB-H1"] = max(step + ((p - 1) / 3 * mean + hops * message) / K, flush * (2 / 3 * mean + hops * message / p))
    for name, saved in (("V-Half", 1 / 2), ("V-Min", 1 / 3)):
        found[name] = flushed(step, mean, 2 * message) - saved * (p - 1) * mean / K
    parameters = layers * layer_weights(size) + 2 * width * V
    transfer = 6 * parameters * (p - 1) / p / link
    return found | {"FSDP": max(K / p * fsdp * sum(forwards(size, 1)) / flops, transfer) / K}


@pytest.mark.parametrize("size", dict.fromkeys(cell["size"] for cell in CELLS))
@pytest.mark.parametrize("teraflops", TERAFLOPS)
def test_three_cells_of_each_map_are_those_of_a_recalculation(size: str, teraflops: int) -> None:
    own = [cell for cell in CELLS if (cell["size"], cell["teraflops"]) == (size, teraflops)]
    bandwidths, memories = sorted({cell["bandwidth"] for cell in own}), sorted({cell["memory"] for cell in own})
    cells = {(cell["memory"], cell["bandwidth"]): cell["seconds"] for cell in own}
    for bandwidth in (bandwidths[-1], bandwidths[0]):
        found, expected = cells[memories[-1], bandwidth], by_hand(size, teraflops, bandwidth, 4 if size == "70 B" else 3)
        near = dict.fromkeys(expected, (0.95, 1.05))
        if size == "70 B":
            # No device has room for graphs of 64 or 33 microbatches, so 1F1B recomputes. Stages of one and two layers wait for
            # each other.
            near |= dict.fromkeys((EXACT, REVERSIBLE), (1.0, 1.4)) | dict.fromkeys((PETRA, LATE), (0.95, 1.25))
            assert {near.pop(name) for name in ("ZB-H1", "V-Half") if name not in found} == {(0.95, 1.05)}
        assert all(low * expected[name] <= found[name] <= high * expected[name] for name, (low, high) in near.items())
        for names in (NAMES, EXACT_NAMES):
            best = winner(found, names)
            if size != "70 B" or best in near:  # 1F1B with offload is not recalculated
                assert expected[best] <= 1.05 * min(expected[name] for name in near if name in names)
    # The least memory in which FSDP trains: it recomputes, and its states and inputs fit.
    least = min(memory for memory in memories if "FSDP" in cells[memory, bandwidths[-1]])
    found, (width, layers, *_, p) = cells[least, bandwidths[-1]], SIZES[size]
    assert found["FSDP"] == pytest.approx(by_hand(size, teraflops, bandwidths[-1], 4)["FSDP"], rel=0.05)
    assert 16 * (layers * layer_weights(size) + 2 * width * V) / p + layers * 4 * T * width < 1e9 * least
    for name, streams in ((PETRA, 2), (LATE, 1)):
        if name in found:
            assert 2.99 <= found[name] * teraflops * 1e12 / slowest(size, streams) <= 4.01
