"""Records in the folder of a run: config.yaml, metrics.jsonl, summary.json and curves.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from omegaconf import OmegaConf

from petra.analysis.plots import curves
from petra.errors import invalid
from petra.training import Epoch, JsonLines, Logger, TensorBoardLogger, WandbLogger, means, new_run_folder, write_json
from petra.training.records import write_text_atomically, writing

from ..config.schema import AUTO, Config
from .build import Setup


class Records:
    """Records of a run. The constructor creates the folder with config.yaml and metrics.jsonl.

    Args:
        config: Configuration of the run.
        rows: Metrics of the epochs already done. If a run is resumed in its folder, they replace the content of metrics.jsonl.

    Raises:
        ConfigError: If the folder contains another run or cannot be created.
        DataError: If a file in it cannot be written.
    """

    def __init__(self, config: Config, rows: Sequence[Mapping[str, float]] = ()) -> None:
        name = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{config.model.name}_{config.method.name}_{config.data.name}"
        path = Path("runs", name) if config.run_dir is None else Path(config.run_dir)
        resumed = config.resume == AUTO and (path / "config.yaml").exists()
        self.folder = path if resumed else new_run_folder(path)
        (self.folder / "summary.json").unlink(missing_ok=True)
        write_text_atomically(self.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        self.loggers: list[Logger] = [JsonLines(self.folder / "metrics.jsonl", rows)]
        if config.logger.name == "wandb":
            self.loggers.append(WandbLogger(self.folder, config.logger.project, config.logger.mode, asdict(config)))
        if config.logger.name == "tensorboard":
            self.loggers.append(TensorBoardLogger(self.folder, len(rows)))

    def finish(self, summary: dict[str, Any], history: Sequence[Epoch]) -> None:
        """Close the loggers, draw curves.png and write summary.json, whose existence marks a complete run."""
        for logger in self.loggers:
            logger.close()
        title = f"{summary['model']}, {summary['method']} (d = {summary['delay']}), {summary['stages']} stages"
        with writing(self.folder / "curves.png"):
            curves({"": [epoch.row() for epoch in history]}, self.folder / "curves.png", title)
        write_json(self.folder / "summary.json", summary)
        print(
            f"test accuracy {summary['test_accuracy']:.2%} after {summary['wall_seconds']:.0f} s; records in {self.folder}",
            flush=True,
        )


def headline(setup: Setup) -> str:
    """Return one line that describes the run."""
    plan, facts = setup.plan, _facts(setup)
    idle = plan.layout.dp * sum(not stages for stages in plan.layout.processes)
    return (
        f"{facts['model']} with {facts['parameters']:,} parameters by {facts['method']} (d = {facts['delay']}, k = {facts['k']}): "
        f"{facts['stages']} stages in {facts['processes']} process(es) on {facts['device']}, transport {facts['transport']}"
        + (f"; {facts['dp']} replicas with {plan.layout.inputs.shape[0]} samples each" if facts["dp"] > 1 else "")
        + (f"; {idle} process(es) without a stage are idle" if idle else "")
    )


def summarise(setup: Setup, microbatches: int, history: Sequence[Epoch], memory: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return the content of summary.json. Losses are in nats, accuracies from 0 to 1. Speed is that of training alone.

    Args:
        microbatches: Number of microbatches trained.
        memory: Peak memory of each process in bytes.
        seconds: Duration of the whole run.
    """
    last = history[-1]
    return _facts(setup) | {
        "epochs": len(history),
        "microbatches": microbatches,
        **{f"train_{key}": value for key, value in means(last.train, setup.unit).items()},
        **{f"test_{key}": value for key, value in means(last.test, setup.unit).items()},
        f"{setup.unit}_per_second": harmonic_mean([epoch.train.targets / epoch.training_seconds for epoch in history]),
        "peak_memory_bytes": list(memory),
        "wall_seconds": seconds,
        "seed": setup.config.seed,
        "torch": torch.__version__,
    }


def _facts(setup: Setup) -> dict[str, Any]:
    plan = setup.plan
    return {
        "method": plan.method.name,
        "delay": plan.method.delay,
        "remedy": setup.config.remedy.name,
        "model": plan.model.name,
        "model_options": setup.config.model.options(),
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


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl, one for each epoch.

    Raises:
        ConfigError: If the folder is not a run's, or the run has not finished an epoch.
    """
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        raise invalid("runs", "folders of runs with a finished epoch", f"{folder}, where metrics.jsonl has none")
    return rows
