"""Start of a run: from random weights, its own last checkpoint, another run's checkpoint, or weights in a file."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import invalid, require
from petra.method import Keep
from petra.pipeline import Pipeline
from petra.training import facts_of, newest, restore
from petra.training.checkpoint import FACTS, verify
from petra.training.state import load_state
from petra.training.weight_files import State

from ..config.schema import AUTO, Config
from ..runtime.rank import Process
from .build import Setup
from .folder import CONFIG
from .saved import as_data, changes_results, differences, flat, require_format
from .weights import FOLDER, Weights

FIXED = ("optim._target_",)
"""Keys that no resumed run may change, because the state in the checkpoint has another form."""
LENGTHS = ("data._target_", "data.size", "data.batch_size", "data.images", "data.validation", "trainer.limit_batches")
"""Keys that can change the number of microbatches in an epoch, as other files in ``data.root`` can."""


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from.

    Attributes:
        path: Folder of the checkpoint, or of the run with ``state``; None if the run starts without either.
        facts: Facts stored in the checkpoint: configuration, chosen settings, state of the trainer.
        changes: Keys that the run changes, with their values in the checkpoint and in the run.
        state: State of this rank's stages, if another part of the run has kept it in memory: the last generation of replicas.
    """

    path: Path | None
    facts: Mapping[str, Any]
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    state: State | None = None

    @property
    def trainer(self) -> Mapping[str, Any] | None:
        """The trainer's state in the checkpoint, or None without a checkpoint."""
        return self.facts.get("trainer")

    @property
    def run(self) -> Path | None:
        """Folder of the run that the checkpoint belongs to, or None without a checkpoint."""
        return self.path and (self.path if self.state is not None else self.path.parent.parent)


def find_start(config: Config, process: Process) -> Start:
    """Return the checkpoint that the configuration asks to start from. Every rank must call this function; rank 0 searches.

    Raises:
        PetraError: If ``resume`` names a folder without a complete checkpoint, or if its configuration differs in a key that
            changes what is computed. Raised on every rank.
    """
    path, facts, changes = None, dict[str, Any](), dict[str, tuple[Any, Any]]()
    with raise_on_all_ranks():
        if process.first and config.resume is not None:
            path = _checkpoint(config)
            facts = {} if path is None else facts_of(path)
            if path is not None:
                require_format(facts.get("config", {}), path)
                changes = require_same(facts["config"], as_data(config), path, config.resume_change or ())
    return Start(*all_gather_objects((path, facts, changes))[0])


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
        ConfigError: If they differ in another key that changes what is computed, or if there is no such key or group.
    """
    for name in allowed:
        known = any(key == name or key.startswith(f"{name}.") for key, _ in flat(wanted))
        require(known, "resume_change", "a list of keys and groups", name)
    changes = {key: values for key, values in differences(found, wanted).items() if changes_results(key)}
    for key, (before, now) in changes.items():
        hint = "init_from starts from its weights" if key in FIXED else f"resume_change=[{key}] allows another value"
        accepted = key not in FIXED and (key in allowed or key.partition(".")[0] in allowed)
        require(accepted, key, f"{before} as in {path}, which the run resumes from ({hint})", now)
    return changes


def restore_choices(setup: Setup, start: Start) -> Setup:
    """Return the setup with the checkpoint's values for settings that are ``auto``, so that the run resumes exactly.

    If the configuration asks for another partition than the checkpoint's, these values do not apply, and nothing changes.
    """
    chosen = start.facts.get("chosen")
    if not setup.auto or chosen is None:
        return setup
    if "stages" not in setup.auto and [len(stage) for stage in setup.plan.layout.stages] != chosen["stages"]:
        return setup
    delay, keep = chosen["delay"], chosen["keep"]
    method = replace(
        setup.plan.method,
        delay=tuple(delay) if isinstance(delay, list) else delay,
        keep=tuple(map(Keep, keep)) if isinstance(keep, list) else Keep(keep),
    )
    return setup.with_choice(chosen["stages"], method)


def checkpoint_facts(setup: Setup) -> dict[str, Any]:
    """Return the facts that a checkpoint stores: the configuration, and the settings that auto-tuning chose."""
    chosen = {
        "stages": [len(stage) for stage in setup.plan.layout.stages],
        "delay": setup.plan.method.delay,
        "keep": setup.plan.method.keep,
    }
    return {"config": as_data(setup.config), "chosen": chosen}


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
    notes: list[str] = []
    with raise_on_all_ranks():
        if start.path is not None:
            if start.state is None:
                Weights(start.path).require_vocabulary("data.root", vocabulary)
                restore(pipeline, start.path)
            else:
                load_state(pipeline, start.state, start.facts["clock"], "memory")
            moved = move_clock(pipeline, config, start, epoch)
            source = start.path if start.state is None else "the last generation of replicas"
            require(
                pipeline.microbatches_done <= config.trainer.epochs * epoch,
                "trainer.epochs",
                f"an integer >= {math.ceil(pipeline.microbatches_done / epoch)}, because the run resumes from {source}, after "
                f"microbatch {pipeline.microbatches_done} with {epoch} microbatches in an epoch",
                config.trainer.epochs,
            )
            notes.append(f"resuming from {source}, after microbatch {pipeline.microbatches_done}")
            notes += moved
            notes += [f"{key} is {now} from here on, was {before}" for key, (before, now) in start.changes.items()]
        elif config.init_from is not None:
            path, skip = Path(config.init_from), {*(config.init_skip or ())}
            is_run = (path / CONFIG).exists() or (path / FOLDER).is_dir()
            weights = Weights.newest(path, "init_from") if is_run else Weights(path)
            weights.load_into(pipeline, vocabulary, skip)
            random, blocks = f"; random: {', '.join(sorted(skip))}" if skip else "", len(pipeline.plan.model.blocks)
            notes.append(f"initial weights of {blocks - len(skip)} of {blocks} blocks from {weights}{random}")
    return notes


def move_clock(pipeline: Pipeline, config: Config, start: Start, epoch: int) -> list[str]:
    """Move the clock of a restored pipeline to the same epoch if epochs have another length now. Return lines that say so.

    Args:
        epoch: Number of microbatches in an epoch now.

    Raises:
        ConfigError: If k or the length of an epoch changes within an epoch or within an update; or if the clock moves back in the
            same folder, whose later checkpoints would count as newer.
    """
    if start.trainer is None or start.path is None:
        return []
    k = start.changes.get("k", (pipeline.plan.k, pipeline.plan.k))[0]
    history, before = start.trainer["history"], start.trainer["epoch"]
    if k == pipeline.plan.k and before == epoch:
        return []
    ended = pipeline.microbatches_done % k == 0 and not start.trainer["sums"]
    clock = len(history) * epoch
    changed = next((key for key in ("k", *LENGTHS) if key in start.changes), "data.root")
    value, now = start.changes.get(changed, (f"{before} microbatches in an epoch", epoch))
    expected = f"{value} as in {start.path}; only a checkpoint at the end of an epoch and of an update allows another value"
    require(ended and clock % pipeline.plan.k == 0, changed, expected, now)
    require(
        clock >= pipeline.microbatches_done or not _in_run_dir(config, start.path),
        "run_dir",
        f"another folder than that of the checkpoint, for epochs of {epoch} microbatches instead of {before} (resume={start.path})",
        config.run_dir,
    )
    pipeline.microbatches_done = clock
    for worker in pipeline.workers.values():
        worker.microbatches_done = clock
        worker.stage.resume(clock // pipeline.plan.k, worker.stage.previous())
    return [] if before == epoch else [f"an epoch has {epoch} microbatches from here on, had {before}"]


def _in_run_dir(config: Config, path: Path) -> bool:
    """Return whether a checkpoint belongs to the run's own folder."""
    return config.resume == AUTO or (config.run_dir is not None and Path(config.run_dir).resolve() in path.resolve().parents)


def _checkpoint(config: Config) -> Path | None:
    if config.resume == AUTO:
        return newest(Path(str(config.run_dir)) / FOLDER)
    path = Path(str(config.resume))
    if (path / FACTS).exists():
        verify(path)
        return path
    if (found := newest(path / FOLDER)) is None:
        raise invalid("resume", "null, auto, or the folder of a run or a checkpoint", f"{path}, which has no checkpoint")
    return found
