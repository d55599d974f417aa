"""Start of a run: from random weights, its own last checkpoint, another run's checkpoint, or weights in a file."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import invalid, require
from petra.method import Keep
from petra.pipeline import Pipeline
from petra.training import facts_of, load, load_into, network, newest, restore
from petra.training.checkpoint import FACTS, verify
from petra.training.export import State
from petra.training.records import writing

from ..config.schema import AUTO, Config
from ..runtime.rank import Process
from .build import Setup

FOLDER = "checkpoints"
PROBE = ".seen_by_all_"
"""Start of the name of the file by which ranks check that they share the run's folder."""
PROBE_TIMEOUT = 60.0
"""Seconds to wait until a network file system shows a new file on other machines."""
CHANGEABLE = (
    "dp",
    "run_dir",
    "resume",
    "init_from",
    "dry_run",
    "checkpoint.",
    "cluster.",
    "logger.",
    "data.root",
    "data.workers",
    "trainer.",
)
"""Keys and groups that a resumed run may change."""
UNCHANGEABLE = (
    "trainer.precision",
    "trainer.exact_streams",
    "trainer.wire",
    "trainer.loss_scale",
    "trainer.nonfinite",
    "trainer.label_smoothing",
    "trainer.limit_batches",
)
"""Keys in the groups of :data:`CHANGEABLE` that a resumed run may not change, because they change what is computed."""


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from.

    Attributes:
        path: Folder of the checkpoint, or None if the run starts without one.
        facts: Facts stored in the checkpoint: configuration, chosen settings, state of the trainer.
    """

    path: Path | None
    facts: Mapping[str, Any]

    @property
    def trainer(self) -> Mapping[str, Any] | None:
        """The trainer's state in the checkpoint, or None without a checkpoint."""
        return self.facts.get("trainer")


def find_start(config: Config, process: Process) -> Start:
    """Return the checkpoint that the configuration asks to start from. Every rank must call this function; rank 0 searches.

    Raises:
        PetraError: If ``resume`` names a folder without a complete checkpoint, or if its configuration differs in a key that
            changes what is computed. Raised on every rank.
    """
    path, facts = None, dict[str, Any]()
    with raise_on_all_ranks():
        if process.first and config.resume is not None:
            path = _checkpoint(config)
            facts = {} if path is None else facts_of(path)
            if path is not None:
                require_same(facts.get("config", {}), asdict(config), path)
    return Start(*all_gather_objects((path, facts))[0])


def require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Check that a checkpoint's configuration agrees with the one that resumes from it.

    Raises:
        ConfigError: If they differ in a key that changes what is computed.
    """
    before, now = dict(flat(found)), dict(flat(wanted))
    for key in dict.fromkeys([*now, *before]):
        same = not changes_results(key) or before.get(key) == now.get(key)
        require(same, key, f"{before.get(key)} as in {path}, which the run resumes from", now.get(key))


def changes_results(key: str) -> bool:
    """Return whether a key of the configuration changes what is computed. The length of a run does not count."""
    return key in UNCHANGEABLE or not key.startswith(CHANGEABLE)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name (``trainer.epochs``) and the value of each key of a configuration."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    return {"config": asdict(setup.config), "chosen": chosen}


def require_shared(folder: Path, config: Config, process: Process) -> None:
    """Check that all ranks share the run's folder. Every rank must call this function.

    Without a shared folder, each machine would have only a part of each checkpoint.

    Raises:
        ConfigError: If a rank does not see the folder. Raised on every rank.
    """
    probe = folder / all_gather_objects(f"{PROBE}{secrets.token_hex(8)}")[0]
    with raise_on_all_ranks():
        if process.first:
            with writing(probe):
                for stale in folder.glob(f"{PROBE}*"):  # left by a run that was killed
                    stale.unlink()
                probe.touch()
    until = time.monotonic() + min(PROBE_TIMEOUT, config.trainer.timeout / 2)
    with raise_on_all_ranks():
        while not probe.exists():
            if time.monotonic() > until:
                raise invalid(
                    "run_dir",
                    "a folder on storage that all machines share, or checkpoint.keep=0",
                    f"{folder}, which {socket.gethostname()} does not see",
                )
            time.sleep(0.1)
    if process.first:
        probe.unlink()


def load_start(pipeline: Pipeline, config: Config, start: Start) -> None:
    """Load the checkpoint or the weights that the run starts from into this rank's part of the pipeline.

    Raises:
        PetraError: If a file cannot be read or belongs to another network. Raised on every rank.
    """
    with raise_on_all_ranks():
        if start.path is not None:
            restore(pipeline, start.path)
        elif config.init_from is not None:
            path = Path(config.init_from)
            load_into(pipeline, read_weights(path), str(path))


def read_weights(path: Path) -> State:
    """Return the weights in an exported file or in a checkpoint's folder.

    Raises:
        PetraError: If it cannot be read.
    """
    if not path.is_dir():
        return load(path)
    verify(path)
    return network(path)


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
