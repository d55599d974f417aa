"""Start of a run: from random weights, its own last checkpoint, or the weights of another run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import DataError, require
from petra.pipeline import Pipeline
from petra.training import FORMATS, Row, facts_of, newest, restore
from petra.training.records import read_rows
from petra.training.state import load_state
from petra.training.weight_files import State

from ..config.schema import Config
from ..runtime.rank import Process
from .folder import CHECKPOINTS, CONFIG, METRICS, SUMMARY, as_data, changes_results, differences, flat, load_config, require_format
from .weights import SavedWeights, network_of

FIXED = ("optim._target_", "optim.weights", "k")
"""Keys that no resumed run may change: the state in the checkpoint has another form, or belongs to another number of updates."""


@dataclass(frozen=True)
class Start:
    """What a run starts from: nothing, a checkpoint, or the last generation of replicas.

    Attributes:
        path: Folder of the checkpoint, or of the run with ``state``; None if the run starts without either.
        facts: Facts stored in the checkpoint: configuration, chosen settings, state of the trainer.
        changes: Keys that the run changes, with their values in the checkpoint and in the run.
        state: State of this rank's stages, if another part of the run has kept it in memory: the last generation of replicas.
        lost: Epochs in the folder of a run that starts again, since it has no checkpoint.
    """

    path: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    state: State | None = None
    lost: int = 0

    @property
    def history(self) -> Sequence[Row]:
        """Numbers of the epochs already done."""
        return self.facts["trainer"]["history"] if self.path else ()

    @property
    def clock(self) -> int:
        """Number of microbatches already trained on."""
        return self.facts["clock"] if self.path else 0


def find_start(config: Config, process: Process) -> Start:
    """Return the newest checkpoint of a run that may resume. Every rank must call this function; rank 0 searches.

    Raises:
        PetraError: If all checkpoints are damaged, if the configuration differs in a key that changes what is computed, or if the
            run has results but no checkpoint. Raised on every rank.
    """
    start, folder = Start(), Path(str(config.run_dir))
    with raise_on_all_ranks():
        if process.first and config.resume is not None:
            for name in config.resume_change or ():  # also at the first start: a mistake would show when the run is restarted
                known = any(key == name or key.startswith(f"{name}.") for key, _ in flat(as_data(config)))
                require(known, "resume_change", "a list of keys and groups", name)
            path = newest(folder / CHECKPOINTS)
            start = _again(config, folder) if path is None else _resumed(config, path)
    found: Start = all_gather_objects(start)[0]
    return found


def _resumed(config: Config, path: Path) -> Start:
    """Return the start from a checkpoint."""
    facts = facts_of(path)
    saved, trainer = (facts[key] if isinstance(facts.get(key), dict) else {} for key in ("config", "trainer"))
    saved = require_format(saved, path)
    rows, sums = trainer.get("history"), trainer.get("sums")
    valid = isinstance(rows, list) and all(isinstance(row, dict) for row in rows) and isinstance(sums, list)
    valid = valid and isinstance(trainer.get("epoch"), int)
    require(valid, f"checkpoint {path}", "the state of a trainer in its facts", "none that is valid", DataError)
    changes = require_same(saved, as_data(config), path, config.resume_change or ())
    _require_same_weights(saved, config, path)
    return Start(path, facts, changes)


def _again(config: Config, folder: Path) -> Start:
    """Return the start of a run without a checkpoint. If it started before, it ended before its first one.

    Another configuration may start in its folder only if no epoch is lost, such as after an error at the start.
    """
    file, exports = folder / CONFIG, (f"{name}{suffix}" for name in ("model", "ema") for suffix in FORMATS.values())
    if not file.exists():
        return Start()
    results = [name for name in (SUMMARY, *exports) if (folder / name).exists()]
    expected = "a folder without results, or with a checkpoint to resume from (run_dir=FOLDER with another one starts a run)"
    require(not results, "run_dir", expected, f"{folder} with {', '.join(results)} and no checkpoint")
    lost = len(read_rows(folder / METRICS))
    if lost == 0:
        return Start()
    saved = load_config(file)
    _require_same_weights(saved, config, file)
    for key, (before, now) in differences(saved, as_data(config)).items():
        expected = f"{before} as in {file}, whose run starts again since it has no checkpoint (another run_dir starts another run)"
        require(not changes_results(key), key, expected, now)
    return Start(lost=lost)


def _require_same_weights(found: Mapping[str, Any], config: Config, path: Path) -> None:
    """Check that a run that continues or starts again names the initial weights with which it started.

    Raises:
        ConfigError: If it names others, which it would record without loading them.
    """
    for key in ("init_from", "init_skip"):
        before, now = found.get(key), getattr(config, key)
        paths = isinstance(before, str) and isinstance(now, str) and Path(before).resolve() == Path(now).resolve()
        shown, got = ("null" if value is None else value for value in (before, now))
        expected = f"{shown} as in {path}, since the run has started (another run_dir starts another run)"
        require(before == now or paths, key, expected, got)


def require_same(
    found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path, allowed: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Check that a checkpoint's configuration agrees with the one that resumes from it. Return the allowed differences.

    Args:
        found: Configuration in the checkpoint.
        wanted: Configuration of the run.
        path: The checkpoint, for messages.
        allowed: Keys and groups in which they may differ.

    Raises:
        ConfigError: If they differ in another key that changes what is computed.
    """
    apart = {"dp"} if found.get("outer", {}).get("every") else set()  # each replica trains on its own samples
    changes = {key: values for key, values in differences(found, wanted).items() if changes_results(key) or key in apart}
    for key, (before, now) in changes.items():
        hint = "init_from starts from its weights" if key in FIXED else f"resume_change=[{key}] allows another value"
        accepted = key not in FIXED and (key in allowed or key.partition(".")[0] in allowed)
        require(accepted, key, f"{before} as in {path}, which the run resumes from ({hint})", now)
    return changes


def load_start(pipeline: Pipeline, config: Config, start: Start, epoch: int, vocabulary: str | None = None) -> list[str]:
    """Load the checkpoint or the weights that the run starts from into this rank's part of the pipeline.

    Args:
        epoch: Number of microbatches in an epoch.
        vocabulary: Fingerprint of the vocabulary of the run's tokens, or None if there is none.

    Returns:
        Lines that describe what was loaded.

    Raises:
        PetraError: If a file cannot be read or belongs to another network. Raised on every rank.
    """
    chosen: SavedWeights | None = None
    with raise_on_all_ranks():
        if pipeline.rank == 0 and start.path is None and config.init_from is not None:
            chosen = SavedWeights.at(Path(config.init_from), "init_from")
    initial = all_gather_objects(chosen)[0]  # while the run that it names trains, each process could find other ones
    with raise_on_all_ranks():
        if start.path is None:
            lost = [f"starting again, since the run has no checkpoint: {start.lost} epochs are lost"] if start.lost else []
            weights = [] if initial is None else [_load_weights(pipeline, config, initial, vocabulary)]
            return [*lost, *weights]
        if start.state is None:
            SavedWeights(start.path).require_vocabulary("data.root", vocabulary)
            SavedWeights(start.path).require_network(config)
            restore(pipeline, start.path)
        else:
            load_state(pipeline, start.state, start.clock, "memory")
        done, before = start.clock, start.facts["trainer"]["epoch"]
        source = start.path if start.state is None else "the last generation of replicas"
        expected = f"data with {before} microbatches in an epoch, as in the run so far (init_from starts from its weights)"
        require(epoch == before, str(source), expected, epoch)
        reason = f"the run resumes from {source}, after microbatch {done} with {epoch} microbatches in an epoch"
        expected = f"an integer >= {math.ceil(done / epoch)}, because {reason}"
        require(done <= config.trainer.epochs * epoch, "trainer.epochs", expected, config.trainer.epochs)
        changes = (f"{key} is {now} from here on, was {before}" for key, (before, now) in start.changes.items())
        return [f"resuming from {source}, after microbatch {done}", *changes]


def _load_weights(pipeline: Pipeline, config: Config, weights: SavedWeights, vocabulary: str | None) -> str:
    """Load the weights that ``init_from`` names, and return a line that says which."""
    skip, blocks = {*(config.init_skip or ())}, len(pipeline.plan.model.blocks)
    weights.load_into(pipeline, vocabulary, skip)
    other = differences(weights.facts.get("config", as_data(config)), as_data(config))
    others = [key for key in other if key.startswith("model.")]
    if weights.facts.get("network") not in (None, network_of(config)):
        others.append("config.json in model.path")
    notes = {"random": sorted(skip), "trained with other values": others}
    shown = "".join(f"; {note}: {', '.join(names)}" for note, names in notes.items() if names)
    return f"initial weights of {blocks - len(skip)} of {blocks} blocks from {weights}{shown}"
