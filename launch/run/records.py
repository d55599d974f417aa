"""Records that a run writes: config.yaml, metrics.jsonl, updates.jsonl, changes.jsonl, summary.json, curves.png, report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from omegaconf import OmegaConf

from petra.analysis.plots import curves
from petra.training import JsonLines, Logger, Row, new_run_folder, write_json
from petra.training.checkpoint import checkpoints
from petra.training.progress import means_text
from petra.training.records import write_text_atomically, writing

from ..config.schema import AUTO, Config
from .build import Setup
from .dry_run import stage_facts
from .folder import CONFIG, METRICS, SUMMARY, UPDATES, RunFolder, default_folder
from .report import describe, write_report
from .saved import as_data
from .targets import built
from .weights import FOLDER

CHANGES = "changes.jsonl"
"""File with the settings that were changed when the run was resumed."""
RESULTS = ("miou", "perplexity", "accuracy")
"""Metrics on the test data; the last line of a run has the first one that it recorded."""
PICTURES = ("curves.png", "timeline.png", "gradients.png")


class Records:
    """Records of a run. The constructor creates the folder with config.yaml and metrics.jsonl.

    Args:
        config: Configuration of the run.
        rows: Metrics of the epochs already done. If a run is resumed in its folder, they replace the content of metrics.jsonl.
        before: Folder of the run that this one resumes, whose rows of updates.jsonl are copied, or None.
        clock: Number of microbatches already trained on.

    Attributes:
        loggers: Receivers of the numbers of epochs.
        update_loggers: Receivers of the numbers of updates.

    Raises:
        ConfigError: If the folder contains another run or cannot be created.
        DataError: If a file in it cannot be written.
    """

    def __init__(
        self, config: Config, rows: Sequence[Mapping[str, float]] = (), before: Path | None = None, clock: int = 0
    ) -> None:
        updates = [] if before is None else RunFolder(before).updates(clock)
        path = default_folder(config) if config.run_dir is None else Path(config.run_dir)
        # A folder that was deleted while its run wrote checkpoints has no config.yaml.
        resumed = config.resume == AUTO and ((path / CONFIG).exists() or bool(checkpoints(path / FOLDER)))
        self.folder = path if resumed else new_run_folder(path)
        (self.folder / SUMMARY).unlink(missing_ok=True)
        content = as_data(config)
        write_text_atomically(self.folder / CONFIG, OmegaConf.to_yaml(content))
        shared: list[Logger] = []
        if config.logger.name != JsonLines.__name__:
            earlier = sorted([*updates, *rows], key=lambda row: row["microbatches"])
            given = {"folder": self.folder, "config": content, "rows": earlier, "microbatches": clock}
            shared.append(built(Logger, "logger", config.logger, **given))  # type: ignore[type-abstract]
        self.loggers: list[Logger] = [JsonLines(self.folder / METRICS, rows), *shared]
        self.update_loggers: list[Logger] = [JsonLines(self.folder / UPDATES, updates), *shared]

    def log_changes(self, microbatch: int, changes: Mapping[str, tuple[Any, Any]]) -> None:
        """Append the settings that a resumed run changes to changes.jsonl, one line for each key.

        Args:
            microbatch: Number of microbatches already trained.
            changes: Keys with their values before and from now on.
        """
        for key, (before, now) in changes.items():
            JsonLines(self.folder / CHANGES).log({"microbatch": microbatch, "key": key, "before": before, "now": now})

    def finish(self, summary: dict[str, Any], history: Sequence[Row]) -> None:
        """Draw curves.png, close the loggers, and write report.html and summary.json, whose existence marks a complete run."""
        title = f"{summary['model']}, {summary['method']} (d = {summary['delay']}), {summary['stages']} stages"
        with writing(self.folder / "curves.png"):
            curves({"": history}, self.folder / "curves.png", title, {"": RunFolder(self.folder).updates()})
        for logger in self.loggers:
            logger.close(summary, [path for name in PICTURES if (path := self.folder / name).exists()])
        write_report(self.folder, summary)
        write_json(self.folder / SUMMARY, summary)
        metric = next(name for name in RESULTS if f"test_{name}" in summary)
        result = means_text({metric: summary[f"test_{metric}"]})
        print(f"test {result} after {summary['wall_seconds']:.0f} s; records in {self.folder}", flush=True)


def headline(setup: Setup) -> str:
    """Return one line that describes the run."""
    plan, facts = setup.plan, _facts(setup)
    idle = plan.layout.dp * sum(not stages for stages in plan.layout.processes)
    return (
        describe(facts)
        + (f"; {facts['dp']} replicas with {plan.layout.inputs.shape[0]} samples each" if facts["dp"] > 1 else "")
        + (f"; {idle} process(es) without a stage are idle" if idle else "")
    )


def summarise(setup: Setup, microbatches: int, history: Sequence[Row], memory: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return the content of summary.json. Losses are in nats, accuracies from 0 to 1. Speed is that of training alone.

    Args:
        microbatches: Number of microbatches trained.
        memory: Peak memory of each process in bytes.
        seconds: Duration of the whole run.
    """
    speed = f"{setup.unit}_per_second"
    return _facts(setup) | {
        "epochs": len(history),
        "microbatches": microbatches,
        **{key: value for key, value in history[-1].items() if key.startswith(("train_", "test_"))},
        speed: harmonic_mean([row[speed] for row in history]),
        "peak_memory_bytes": list(memory),
        "wall_seconds": seconds,
        "seed": setup.config.seed,
        "torch": torch.__version__,
        "layout": stage_facts(setup.plan),
    }


def _facts(setup: Setup) -> dict[str, Any]:
    plan = setup.plan
    return {
        "method": plan.method.name,
        "delay": plan.method.delay,
        "remedy": setup.config.remedy.name,
        "model": plan.model.name,
        "model_options": {name: value for name, value in setup.config.model.options.items() if value is not None},
        "data": setup.config.data.name,
        "parameters": plan.parameters,
        "stages": len(plan.stages),
        "processes": setup.processes,
        "dp": plan.layout.dp,
        "transport": plan.transport,
        "device": setup.device.type,
        "precision": setup.config.trainer.precision,
        "k": plan.k,
        "batch_size": setup.config.data.batch_size,
    }
