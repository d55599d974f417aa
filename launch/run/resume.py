"""Where a run starts: at random weights, at its own last checkpoint, at another run's, or at weights in a file."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.config.schema import AUTO, Config
from launch.run.build import Setup
from launch.runtime.rank import Process
from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import ConfigError
from petra.method import Keep
from petra.pipeline import Pipeline
from petra.training import facts_of, load, load_into, network, newest, restore
from petra.training.checkpoint import FACTS, verify
from petra.training.export import State
from petra.training.records import writing

FOLDER = "checkpoints"
MARK = ".seen_by_all_"
SHOWN = 60.0
"""Seconds after which any network file system shows a new file on other machines."""
FREE = (
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
"""Keys, or groups, that a resumed run may change."""
FIXED = (
    "trainer.precision",
    "trainer.exact_streams",
    "trainer.wire",
    "trainer.loss_scale",
    "trainer.nonfinite",
    "trainer.label_smoothing",
    "trainer.limit_batches",
)
"""Those among them that it may not: they change what is computed."""


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on from, or none."""

    path: Path | None
    facts: Mapping[str, Any]

    @property
    def trainer(self) -> Mapping[str, Any] | None:
        """What the checkpoint knows of the trainer."""
        return self.facts.get("trainer")


def find_start(config: Config, process: Process) -> Start:
    """Where the configuration says to start; every process makes the call, the first one looks.

    Raises:
        PetraError: no whole checkpoint where there should be one, or one of another configuration; in every process.
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
    """Compares a checkpoint's configuration with the one that wants to go on.

    Raises:
        ConfigError: they differ where it matters; it names the key.
    """
    before, now = dict(flat(found)), dict(flat(wanted))
    for key in dict.fromkeys([*now, *before]):
        if matters(key) and before.get(key) != now.get(key):
            raise ConfigError(f"{key}: found {now.get(key)} with resume, accepted is {before.get(key)} as in {path}")


def matters(key: str) -> bool:
    """Whether a key of the configuration changes what is computed, the length of the run aside."""
    return key in FIXED or not key.startswith(FREE)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of a configuration, with the groups it is in."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_before(setup: Setup, start: Start) -> Setup:
    """Return the setup with everything that is ``auto`` as the checkpoint's run has chosen it, so that the run resumes exactly."""
    chosen = start.facts.get("chosen")
    if not setup.auto or chosen is None:
        return setup
    if "stages" not in setup.auto and [len(stage) for stage in setup.plan.layout.stages] != chosen["stages"]:
        return setup  # another partition was requested, to which the choice does not apply
    delay, keep = chosen["delay"], chosen["keep"]
    method = replace(
        setup.plan.method,
        delay=tuple(delay) if isinstance(delay, list) else delay,
        keep=tuple(map(Keep, keep)) if isinstance(keep, list) else Keep(keep),
    )
    return setup.with_choice(chosen["stages"], method)


def facts(setup: Setup) -> dict[str, Any]:
    """Return what a checkpoint stores about its run."""
    chosen = {
        "stages": [len(stage) for stage in setup.plan.layout.stages],
        "delay": setup.plan.method.delay,
        "keep": setup.plan.method.keep,
    }
    return {"config": asdict(setup.config), "chosen": chosen}


def require_shared(folder: Path, config: Config, process: Process) -> None:
    """Makes sure that every process sees the run's folder; each makes the call.

    Raises:
        ConfigError: one doesn't, so that its part of a checkpoint would stay on its own machine; in every process.
    """
    mark = folder / all_gather_objects(f"{MARK}{secrets.token_hex(8)}")[0]
    with raise_on_all_ranks():
        if process.first:
            with writing(mark):
                for left in folder.glob(f"{MARK}*"):  # by a start that was killed
                    left.unlink()
                mark.touch()
    until = time.monotonic() + min(SHOWN, config.trainer.timeout / 2)
    with raise_on_all_ranks():
        while not mark.exists():
            if time.monotonic() > until:
                raise ConfigError(
                    f"checkpoint.keep: found {config.checkpoint.keep}, but {socket.gethostname()} doesn't see the run's folder "
                    f"{folder}, accepted are a run_dir on storage that all machines share, or checkpoint.keep=0"
                )
            time.sleep(0.1)
    if process.first:
        mark.unlink()


def begin(pipeline: Pipeline, config: Config, start: Start) -> None:
    """Gives this process's blocks the state that the run starts with.

    Raises:
        PetraError: a file that can't be read or belongs to another network; in every process.
    """
    with raise_on_all_ranks():
        if start.path is not None:
            restore(pipeline, start.path)
        elif config.init_from is not None:
            path = Path(config.init_from)
            load_into(pipeline, weights(path), str(path))


def weights(path: Path) -> State:
    """The network in a file of exported weights or in a checkpoint's folder.

    Raises:
        PetraError: it can't be read.
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
        raise ConfigError(f"resume: found no checkpoint in {path}, accepted are null, auto, a run's folder or a checkpoint's")
    return found
