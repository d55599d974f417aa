"""Weights of a trained run: which file or checkpoint they are read from, how a command names it, and their evaluation."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from petra.data.files import reading
from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import DataError, ModelError, require
from petra.inplace_abn import ConfusionMatrix
from petra.inplace_abn.segmentation import class_names
from petra.pipeline import Pipeline
from petra.training import FORMATS, best_of, facts_in, facts_of, limited, load, load_into, means, network, newest
from petra.training.checkpoint import FACTS, checkpoints, verify
from petra.training.records import finite
from petra.training.weight_files import HASH, State

from ..config.schema import Config, Section
from ..runtime.rank import Process
from .build import Setup, model_of, set_numerics, set_up
from .folder import CHECKPOINTS, CONFIG, changes_results, differences, load_config, upgraded
from .page import evaluated_text

AVERAGE = "average"
"""Name under a checkpoint's folder that asks for its moving average instead of its weights. There is no such file."""


UNUSED = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of a checkpoint's config.json that don't change what petra trains."""


def network_of(config: Config) -> str | None:
    """Return a hash of the network that config.json in ``model.path`` describes, or None for networks of petra."""
    if config.model.name != "huggingface":
        return None
    path = Path(str(config.model.options["path"]), "config.json")
    with reading(path):
        content = {key: value for key, value in json.loads(path.read_bytes()).items() if key not in UNUSED}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a whole network. All methods raise a PetraError if they can't be read.

    Attributes:
        path: File of exported weights, folder of a checkpoint, or ``CHECKPOINT/average`` for the moving average in one.
    """

    path: Path

    @staticmethod
    def at(path: Path, key: str) -> SavedWeights:
        """Return the weights at a path, or a run's newest weights for the path of its folder.

        Of the run's exports and its newest intact checkpoint, the newest are those with the largest clock, an export at equal
        clocks. An export without a clock, of an earlier version or another program, counts as older than any checkpoint and any
        export with a clock. Moving averages and the best checkpoint are taken only by their paths.

        Args:
            key: Key that names the path, for the message.

        Raises:
            ConfigError: If the run has neither exported weights nor a checkpoint.
        """
        if not ((path / CONFIG).exists() or (path / CHECKPOINTS).is_dir()):
            return SavedWeights(path)
        exports = [SavedWeights(file) for suffix in FORMATS.values() if (file := path / f"model{suffix}").exists()]
        export = max(exports, key=lambda weights: (weights.clock, weights.path.stat().st_mtime), default=None)
        hashes = {known for other in exports if (known := other.facts.get(HASH)) and export and other.clock == export.clock}
        require(len(hashes) < 2, key, "a run whose exports are equal", f"{path}, where model.* differ", DataError)
        newer = any(export is None or int(saved.name) > export.clock for saved in checkpoints(path / CHECKPOINTS))
        checkpoint = newest(path / CHECKPOINTS) if newer else None
        found = [*([export] if export else []), *([SavedWeights(checkpoint)] if checkpoint else [])]
        require(bool(found), key, "a folder with exported weights or checkpoints", path)
        return max(found, key=lambda weights: weights.clock)  # the newest checkpoints may be damaged

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that has the weights, or None for exported ones."""
        averaged = self.path.name == AVERAGE and (self.path.parent / FACTS).exists()
        return self.path.parent if averaged else self.path if self.path.is_dir() else None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts that were written with the weights."""
        facts = facts_in(self.path) if self.checkpoint is None else facts_of(self.checkpoint)
        return {**facts, "config": upgraded(facts["config"])} if isinstance(facts.get("config"), dict) else facts

    @property
    def clock(self) -> int:
        """Microbatches after which the weights were written, or -1 if that is unknown."""
        clock = self.facts.get("clock")
        return clock if isinstance(clock, int) else -1

    def read(self) -> State:
        """Return the tensors by name."""
        if self.checkpoint is None:
            return load(self.path)
        verify(self.checkpoint)
        return network(self.checkpoint, averaged=self.checkpoint != self.path)

    def require_vocabulary(self, name: str, found: str | None) -> None:
        """Check that a vocabulary, or names of classes, are those with which the weights were trained. Unknown ones pass.

        Args:
            name: Key or file with the vocabulary, for the message.
            found: Its fingerprint (:func:`petra.data.tokenizer.fingerprint`), or None if it is unknown.

        Raises:
            DataError: If it is another vocabulary.
        """
        if found is not None and (trained := self.facts.get("vocabulary")) is not None:
            expected = f"the vocabulary or names of classes {trained:.12}, with which {self.path} was trained"
            require(found == trained, name, expected, f"those of {found:.12}", DataError)

    def require_network(self, config: Config) -> None:
        """Check that ``model.path`` describes the network that was trained. An unknown one passes.

        Raises:
            DataError: If its config.json has changed, or is another one.
        """
        trained, path = self.facts.get("network"), config.model.options.get("path")
        expected = f"a folder whose config.json describes the network of {self.path}"
        require(trained in (None, network_of(config)), "model.path", expected, f"{path}, with another", DataError)

    def load_into(self, pipeline: Pipeline, vocabulary: str | None, skip: Collection[str] = ()) -> None:
        """Load the weights into this process's part of a pipeline.

        Args:
            vocabulary: Fingerprint of the vocabulary of its tokens, which must be that of the weights unless blocks are skipped.
            skip: Names of blocks that keep their weights (``init_skip``).

        Raises:
            ConfigError: If there is no such block.
            DataError: If the weights are those of another network or for another vocabulary.
        """
        names = [block.name for block in pipeline.plan.model.blocks]
        for name in skip:
            require(name in names, "init_skip", f"names of blocks ({', '.join(names)})", name)
        self.require_vocabulary("data.root", None if skip else vocabulary)
        load_into(pipeline, self.read(), str(self.path), skip)

    def network(self, config: Config) -> nn.Module:
        """Return the whole network of a run as one module on the CPU, in evaluation mode.

        Raises:
            ModelError: If the weights are those of another network.
        """
        self.require_network(config)
        model = model_of(config)
        built = model.build(config.seed)
        try:
            built.load_state_dict(self.read())
        except RuntimeError as error:
            raise ModelError(f"{self.path}: does not fit {model.name} ({' '.join(str(error).split())})") from error
        return built.eval()

    def print_choice(self, folder: Path, *, chosen: bool) -> None:
        """Print to stderr which weights a command reads, and how the configuration that trained them differs from the run's.

        Args:
            folder: Folder of the run.
            chosen: Whether the weights are the newest ones of the run. Its moving average of the same age and its best checkpoint
                are named then, too.
        """
        lines, now = [f"weights of {self}"], load_config(folder / CONFIG)
        if changed := [*filter(changes_results, differences(self.facts.get("config", now), now))]:
            lines.append(f"warning: they were trained with another {', '.join(changed)} than {folder / CONFIG} has")
        if chosen:
            beside = self.path / AVERAGE if self.checkpoint else self.path.with_name(f"ema{self.path.suffix}")
            averages = self.facts.get("config", {}).get("optim", {}).get("average") is not None
            if averages if self.checkpoint else beside.exists() and SavedWeights(beside).clock == self.clock:
                lines.append(f"--weights {beside} takes their moving average, which the run evaluates")
            if (best := best_of(folder / CHECKPOINTS)) is not None and SavedWeights(best).clock != self.clock:
                lines.append(f"--weights {best / AVERAGE if averages else best} takes the best checkpoint")
        print("; ".join(lines), file=sys.stderr, flush=True)

    def __str__(self) -> str:
        if "clock" not in self.facts:
            return f"{self.path}, which does not record its microbatch"
        epochs = self.facts.get("epochs", len(self.facts.get("trainer", {}).get("history", ())))
        return f"{self.path}, after microbatch {self.facts['clock']} ({epochs} epochs done)"


def later_exports(folder: Path, clock: int) -> list[Path]:
    """Return the exported weights of a run after more than ``clock`` microbatches. A file that can't be read is none."""
    found = []
    for path in (folder / f"{name}{suffix}" for name in ("model", "ema") for suffix in FORMATS.values()):
        with suppress(DataError):
            if path.exists() and SavedWeights(path).clock > clock:
                found.append(path)
    return found


def evaluate(config: Config, weights: SavedWeights, process: Process) -> dict[str, Any]:
    """Return loss and metrics on the test data, the same on every rank.

    With pixels, also the intersection over union by class, None for classes that don't occur.

    Args:
        config: Configuration of the run.
        weights: Weights of the run.
        process: This process.

    Raises:
        PetraError: If the configuration, the data or the weights can't be used. Raised on every rank.
    """
    config = replace(  # without what only training uses
        config,
        dp=1,
        optim=replace(config.optim, rules=replace(config.optim.rules, average=None)),
        trainer=replace(config.trainer, transport="auto", trace=None, diagnose=None, stage_metrics=False, stored_format=None),
        cluster=replace(config.cluster, elastic=False),
        logger=Section(_target_="petra.training.JsonLines"),
    )
    setup = set_up(config, process, training=False)
    set_numerics(config.trainer)
    with process.process_group(setup.device, config.trainer.timeout):
        return _evaluate_in_group(setup, weights)


def _evaluate_in_group(setup: Setup, weights: SavedWeights) -> dict[str, Any]:
    """Return loss and metrics. The pipeline ends with this function, before the process group does."""
    train, test = setup.data()
    pipeline, data = setup.pipeline(), setup.config.data
    weights = all_gather_objects(weights)[0]  # while the run trains, each process could find other ones
    with raise_on_all_ranks():
        weights.require_network(setup.config)
        weights.load_into(pipeline, train.vocabulary)
    batches = limited(test.batches, setup.config.trainer.limit_batches)
    result = pipeline.evaluate(test, batches)
    values = means(result, setup.unit, test.bytes_per_target)
    numbers: dict[str, Any] = {"weights": str(weights.path), "evaluated": evaluated_text(setup.config, batches, test.batches)}
    numbers |= {setup.unit: result.targets, **finite(values)}
    if "miou" in result.counts:
        shares = ConfusionMatrix(data.classes).per_class(result.counts["miou"])
        numbers["iou"] = finite(dict(zip(class_names(data.name, len(shares)), shares, strict=True)))
    return numbers
