"""Weights of a trained run: which file or checkpoint they are read from, and how a command names it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petra.errors import DataError, invalid, require
from petra.training import FORMATS, best_of, facts_in, facts_of, load, network, newest
from petra.training.checkpoint import FACTS, checkpoints, verify
from petra.training.weight_files import State

from ..runtime.rank import Process

FOLDER = "checkpoints"
AVERAGE = "average"
"""Name under a checkpoint's folder that asks for its moving average instead of its weights. There is no such file."""
SHOWN = 12
"""Digits of a vocabulary's fingerprint in messages."""


def chosen_weights(folder: Path, named: Path | None, process: Process) -> Path:
    """Return the path of the weights that a command reads, and print it to stderr in the first process.

    Args:
        folder: Folder of the run.
        named: Path that the command line names, or None for the run's newest weights.

    Raises:
        PetraError: If there are no weights, or their facts cannot be read.
    """
    path = named or trained_weights(folder, "run")
    if process.first:
        others = [] if named else _others(folder, path)
        print("; ".join([f"weights of {describe(path)}", *others]), file=sys.stderr, flush=True)
    return path


def trained_weights(folder: Path, key: str) -> Path:
    """Return the path of a run's newest weights: of its exports and its newest intact checkpoint, the one with the largest clock.

    At equal clocks an export is taken. An export without a clock, which an earlier version or another program has written, counts
    as older than any checkpoint and any export with a clock. Moving averages and the best checkpoint are taken only by their paths.

    Args:
        folder: Folder of a run.
        key: Key that names the folder, for the message.

    Raises:
        ConfigError: If the run has neither exported weights nor a checkpoint.
        DataError: If an export cannot be read, or all checkpoints are damaged and there is no export.
    """
    exports = [path for suffix in FORMATS.values() if (path := folder / f"model{suffix}").exists()]
    export = max(exports, key=lambda path: (_clock(path), path.stat().st_mtime), default=None)
    saved = checkpoints(folder / FOLDER)
    if export is not None and not (saved and int(saved[0].name) > _clock(export)):
        return export
    checkpoint = newest(folder / FOLDER)
    if export is not None and checkpoint is not None and _clock(checkpoint) <= _clock(export):  # newer ones are damaged
        return export
    if checkpoint is None:
        raise invalid(key, "a folder with exported weights or checkpoints", folder)
    return checkpoint


def weight_facts(path: Path) -> dict[str, Any]:
    """Return the facts of an exported file, a checkpoint, or a checkpoint's moving average.

    Raises:
        PetraError: If they cannot be read.
    """
    checkpoint = path if path.is_dir() else _checkpoint_of(path)
    return facts_in(path) if checkpoint is None else facts_of(checkpoint)


def describe(path: Path) -> str:
    """Return the path of weights, and after how much training they were written.

    Raises:
        PetraError: If their facts cannot be read.
    """
    facts = weight_facts(path)
    if "clock" not in facts:
        return f"{path}, which does not record its microbatch"
    epochs = facts.get("epochs", len(facts.get("trainer", {}).get("history", ())))
    return f"{path}, after microbatch {facts['clock']} ({epochs} epochs done)"


def read_weights(path: Path) -> State:
    """Return the weights in an exported file or in a checkpoint's folder, or a checkpoint's moving average.

    Raises:
        PetraError: If they cannot be read, or the checkpoint has no moving average.
    """
    checkpoint = _checkpoint_of(path)
    if checkpoint is None and not path.is_dir():
        return load(path)
    verify(checkpoint or path)
    return network(checkpoint or path, averaged=checkpoint is not None)


def require_vocabulary(name: str, found: str | None, facts: Mapping[str, Any], source: Path) -> None:
    """Check that a vocabulary is the one with which weights were trained. An unknown vocabulary passes.

    Args:
        name: Key or file with the vocabulary, for the message.
        found: Its fingerprint (:func:`petra.data.tokenizer.fingerprint`), or None if it is unknown.
        facts: Facts of the weights.
        source: File or folder of the weights.

    Raises:
        DataError: If it is another vocabulary.
    """
    trained = facts.get("vocabulary")
    if trained is not None and found is not None:
        expected = f"tokens of the vocabulary {trained[:SHOWN]}, with which {source} was trained"
        require(found == trained, name, expected, f"those of {found[:SHOWN]}", DataError)


def _checkpoint_of(path: Path) -> Path | None:
    """Return the checkpoint whose moving average a path names, or None if it names something else."""
    return path.parent if path.name == AVERAGE and (path.parent / FACTS).exists() else None


def _clock(path: Path) -> int:
    clock = weight_facts(path).get("clock")
    return clock if isinstance(clock, int) else -1


def _others(folder: Path, path: Path) -> list[str]:
    """Return hints at a moving average of the same age, and at the best checkpoint if it is another one."""
    average = path / AVERAGE if path.is_dir() else path.with_name(f"ema{path.suffix}")
    if path.is_dir():
        has_average = weight_facts(path).get("config", {}).get("optim", {}).get("ema") is not None
    else:
        has_average = average.exists() and _clock(average) == _clock(path)
    best = best_of(folder / FOLDER)
    hints = [f"weights={average} takes their moving average"] if has_average else []
    older = best is not None and _clock(best) != _clock(path)
    return [*hints, f"weights={best} takes the best checkpoint"] if older else hints
