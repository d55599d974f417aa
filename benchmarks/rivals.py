"""Rivals that petra does not train, by formula.

p is the number of devices, k that of microbatches per update, and c the mean time of a forward and a backward on a device.
Costs are counted, so a forward, the gradients of activations and those of parameters take the same time, as the papers assume.

| rival, source (arXiv) | seconds per update | bytes of a device |
|---|---|---|
| ZB-H1, 2401.10241 | simulated | as 1F1B |
| V-Half, 2405.15362 | 1F1B with twice the messages, less (p − 1) c / 2 | (p + 2) / 2p of 1F1B's activations |
| V-Min, 2405.15362 | 1F1B with twice the messages, less (p − 1) c / 3 | (p + 4) / 3p of 1F1B's activations |
| 1F1B with offload, 2503.01328 | 1F1B, but at least k a / h | activations of two microbatches instead of p |
| FSDP, 2304.11277 | the slower of computing and 6 P (p − 1) / p bytes, in each pass | states / p, two gathered blocks |

The bubbles of V-Half and V-Min are a half and two thirds of 1F1B's (their paper's table for equal times). Each device has two
chunks of the network, so each boundary carries every microbatch twice. a bytes of activations per microbatch are offloaded over a
host link of h bytes per second in each direction while the device computes. FSDP gathers P parameters in bf16 twice per pass and
reduces gradients in bf16, in a ring over the same links, while it computes; it takes as many sequences per pass as fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petra.cost_model.costs import BlockCost
from petra.cost_model.keeps import BlockMemory
from petra.cost_model.memory import WORKSPACE, PredictedMemory
from petra.method import Keep


@dataclass(frozen=True)
class Pipelined:
    """1F1B with stored graphs, from which the other pipelines follow.

    Attributes:
        memory: Memory of each device.
        in_flight: Microbatches in flight on each device.
        mean: Mean seconds of a forward and a backward on a device.
        k: Microbatches per update.
    """

    memory: Sequence[PredictedMemory]
    in_flight: Sequence[int]
    mean: float
    k: int

    @property
    def bubble(self) -> float:
        """Seconds per update in which a device of 1F1B is idle."""
        return (len(self.memory) - 1) * self.mean

    def v_shaped(self, name: str, doubled: float) -> tuple[float, float]:
        """Return seconds per microbatch, and bytes of the fullest device.

        Args:
            name: ``V-Half`` or ``V-Min``.
            doubled: Seconds per microbatch of 1F1B with twice the bytes of messages.
        """
        p = len(self.memory)
        share, saved = {"V-Half": ((p + 2) / (2 * p), 1 / 2), "V-Min": ((p + 4) / (3 * p), 1 / 3)}[name]
        stored = max(own.stored for own in self.memory)
        return doubled - saved * self.bubble / self.k, self._rest + min(1.0, share) * stored

    def offloaded(self, seconds: float, host: float) -> tuple[float, float]:
        """Return seconds per microbatch and bytes of the fullest device, given those of 1F1B and bytes per second to the host."""
        each = [own.stored / flight for own, flight in zip(self.memory, self.in_flight, strict=True)]
        kept = max(min(flight, 2) * size for size, flight in zip(each, self.in_flight, strict=True))
        return max(seconds, max(each) / host), self._rest + kept

    @property
    def _rest(self) -> float:
        return max(own.total - own.stored for own in self.memory)


def fsdp(
    blocks: Sequence[BlockCost],
    memory: Sequence[BlockMemory],
    parameters: Sequence[int],
    p: int,
    k: int,
    flops: float,
    bandwidth: float,
) -> Iterator[tuple[float, float]]:
    """Yield seconds per microbatch and bytes of a device, for each number of sequences per pass.

    Passes store graphs, or inputs and the largest graph.

    Args:
        blocks: Costs in FLOPs.
        memory: Bytes of each block, for a graph and for an input.
        parameters: Parameters of each block.
        flops, bandwidth: Of a device and of a link, per second.
    """
    own, states, gathered = k // p, sum(part.fixed for part in memory), 2 * sum(sorted(parameters)[-2:])
    graph = [part.stored[Keep.GRAPH] for part in memory]
    smallest = [part.stored[Keep.INPUT] for part in memory[:-1]]
    for n in (n for n in range(1, own + 1) if own % n == 0):
        for keep, stored in ((Keep.GRAPH, sum(graph)), (Keep.INPUT, sum(smallest) + max(graph))):
            work = sum(sum(block.seconds(keep)) for block in blocks) / flops
            transfer = 6 * sum(parameters) * (p - 1) / p / bandwidth
            one_pass = max(n * work, transfer)
            yield own / n * one_pass / k, states / p + gathered + 4 * max(parameters) + n * stored + WORKSPACE
