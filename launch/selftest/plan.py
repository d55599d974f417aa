"""Which parts the self-test has, and what counts as a failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from petra import METHODS

LARGEST_DIFFERENCE, LARGEST_IN_BF16 = 1e-3, 5e-2
"""Difference of weights from the CPU's, relative to the largest of each tensor, after three updates."""
LARGE_MESSAGE = 64 * 10**6
"""Size in bytes above which NCCL certainly sends a message only when it is received. Tests of transports use larger ones."""
ONE = "training in one process"
"""Part whose weights those of several processes must equal."""


class Trial(NamedTuple):
    """A part of the test (:data:`launch.selftest.parts.PARTS`) with its options, in a number of processes."""

    part: str
    name: str
    options: dict[str, Any]
    processes: int = 1


def plan(processes: int, on_gpus: bool, tiny: bool, full: bool) -> Iterator[Trial]:
    """Yield the parts, most valuable first: those that don't need petra, then training in all processes, in two and in one."""
    device, most = {"device": "cuda" if on_gpus else "cpu"}, processes or 2
    size = {"width": 0.125, "size": 16, "batch": 4} if tiny else {"width": 0.5, "batch": 16}
    tokens = {"model": "revgpt", "batch": 4, **({"size": 16, "dim": 16} if tiny else {"dim": 256})}
    small = {"model": "revnet18", **size, **device, "method": "petra", "k": 2}
    run = (small if most <= 10 else {**small, **tokens, "depth": most}) | {"microbatches": 8 if tiny else 24}
    for n in sorted({most, min(2, most)}, reverse=True):
        if n > 1:
            yield Trial("exchange", f"torch.distributed alone, {n} processes", {**device, "bytes": 2**16 if tiny else 2**27}, n)
        if n == most:
            yield Trial("inspect", "machine", device, n)
        if n > 1:
            yield Trial("train", f"lockstep, {n} processes", {**run, "transport": "lockstep", "same_as": ONE}, n)
            yield Trial("resume", f"checkpoint and resume, {n} processes", run, n)
        if n > 1 and n % 2 == 0:
            yield Trial("train", f"two replicas, {n} processes", {**run, "dp": 2, "same_as": f"lockstep, {n} processes"}, n)
    yield Trial("train", ONE, run)
    yield Trial("blocks", "reversible block and InPlace-ABN against plain operations", device)
    bf16, compiler = {"precision": "bf16", "tolerance": LARGEST_IN_BF16}, {"compile": "aot_eager" if tiny else "inductor"}
    variants: dict[str, dict[str, Any]] = {
        "revnet18": {},
        "revgpt": tokens,
        "revnet18 in bf16": bf16,
        "revnet18, compiled": compiler,
    }
    for name, options in variants.items():
        yield Trial("compare", f"{name}, against the CPU", small | options)
    if full:
        yield from further(most, tiny, small, device | {"k": 2})


def further(several: int, tiny: bool, small: dict[str, Any], common: dict[str, Any]) -> Iterator[Trial]:
    """Yield the parts of the full test: all methods, speed, and large messages, last over edge, which may hang on GPUs."""
    for method in METHODS:
        k = 20 if method in ("pipedream_2bw", "paci") else 2
        yield Trial("compare", f"{method}, against the CPU", {**small, "method": method, "k": k})
    sizes = [("revnet18", 4)] if tiny else [*product(("revnet18", "revnet50", "revgpt"), (64, 256))]
    for (model, batch), method in product(sizes, ("petra", "reversible", "backprop", "1f1b")):
        own = small if tiny else common | {"precision": "bf16", "channels_last": model != "revgpt"}
        options = {**own, "model": model, "batch": batch, "method": method, "k": 4, "microbatches": 8 if tiny else 40}
        yield Trial("speed", f"{model}, batch {batch}, {method}", options, several)
    large = small if tiny else {"model": "revnet18", "batch": 256, "least_bytes": LARGE_MESSAGE}  # 268 MB backward
    for name, delay in (("lockstep", 2), ("lockstep", 1), ("edge", 1), ("edge", 2)) if several > 1 else ():
        options = {**large, **common, "method": "petra", "microbatches": 24, "delay": delay, "transport": name}
        yield Trial("train", f"{name}, d = {delay}, large messages", options, several)


def judge(trial: Trial, found: dict[str, Any], others: Mapping[str, dict[str, Any]]) -> str:
    """Return the result of a part: ``passed``, ``passed, but`` with what was not compared, or why its findings are a failure.

    Args:
        others: Findings of all parts by name.
    """
    options = trial.options
    if found.get("equal", True) is None:
        return "left out: the folder --out is not on storage that all machines share"
    if not found.get("difference", 0.0) <= options.get("tolerance", LARGEST_DIFFERENCE):
        return f"failed: values differ by {found['difference']:.1e}"
    if not found.get("repeatable", True):
        return "failed: two runs with the same seed differ"
    if not found.get("equal", True):
        return "failed: " + ("messages are wrong without petra" if trial.part == "exchange" else "weights differ")
    if (size := found.get("largest_message_bytes", 0)) < (least := options.get("least_bytes", 0)):
        return f"failed: messages have {size / 1e6:.1f} MB, fewer than {least / 1e6:.0f}"
    other = options.get("same_as")
    if other is not None and other not in others:
        return f"passed, but {other} did not run to compare with"
    same = other is None or found.get("digest") == others[other].get("digest")
    return "passed" if same else f"failed: weights differ from those of {other}"
