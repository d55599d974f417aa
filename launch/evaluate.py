"""Evaluate the trained network of a run on the test data, in one process or in several under torchrun.

``python -m launch.evaluate run=FOLDER [weights=FILE] [key=value ...]``

    run      folder of a run, which may still be training
    weights  file of exported weights, or folder of a checkpoint. Default: ema.* in the run's folder if it exists, else model.*,
             else the run's best checkpoint, with its moving average if it has one
    key      any key of the run's configuration, such as data.root, data.batch_size, trainer.device or trainer.limit_batches

Prints one JSON object: loss in nats, accuracies between 0 and 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from petra.distributed import raise_on_all_ranks
from petra.errors import first_line, invalid, require
from petra.training import best_of, limited, load_into, means, newest
from petra.training.export import FORMATS

from .config.errors import config_error
from .config.schema import Config, LoggerConfig, to_config
from .run.build import Setup, set_up
from .run.resume import FOLDER, read_weights
from .runtime.rank import Process
from .runtime.reporting import report_errors


def main(arguments: list[str] | None = None) -> None:
    """Print the results of an evaluation."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return
    process = Process.from_environment()
    with report_errors(process):
        folder, weights, config = parse(words)
        numbers = evaluate(config, weights or exported(folder), process)
        if process.first:
            print(json.dumps(numbers), flush=True)


def parse(words: list[str]) -> tuple[Path, Path | None, Config]:
    """Return the run's folder, the weights that the command line names, and the run's configuration with its overrides.

    Raises:
        ConfigError: If there is no folder of a run, or an override doesn't fit the configuration.
    """
    for word in words:
        require("=" in word, "command line", "run=FOLDER and key=value", word)
    own = dict(word.split("=", 1) for word in words if word.startswith(("run=", "weights=")))
    require("run" in own, "run", "the folder of a run (run=FOLDER)", "nothing")
    folder = Path(own["run"])
    path = folder / "config.yaml"
    require(path.is_file(), "run", "the folder of a run", f"{folder} without a config.yaml")
    changes = [word for word in words if not word.startswith(("run=", "weights="))]
    try:
        composed = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path), OmegaConf.from_dotlist(changes))
    except OmegaConfBaseException as error:
        raise config_error(error, Config) from error
    except Exception as error:  # a damaged file
        raise invalid(str(path), "a configuration in YAML", first_line(error)) from error
    assert isinstance(composed, DictConfig)
    return folder, Path(own["weights"]) if "weights" in own else None, to_config(composed)


def exported(folder: Path) -> Path:
    """Return the path of a run's weights: the exported moving average, the exported weights, the best or the newest checkpoint.

    Raises:
        ConfigError: If the run has neither exported weights nor a checkpoint.
    """
    for name in ("ema", "model"):
        for suffix in FORMATS.values():
            if (path := folder / f"{name}{suffix}").exists():
                return path
    if (checkpoint := best_of(folder / FOLDER) or newest(folder / FOLDER)) is not None:
        return checkpoint
    raise invalid("run", "a folder with exported weights or checkpoints", folder)


def evaluate(config: Config, weights: Path, process: Process) -> dict[str, float | str]:
    """Return loss and metrics on the test data, the same on every rank.

    Args:
        config: Configuration of the run.
        weights: File of exported weights, or folder of a checkpoint.
        process: This process.

    Raises:
        PetraError: If the configuration, the data or the weights can't be used. Raised on every rank.
    """
    # The weights are final, so no moving average is needed. Replicas, diagnostics and logging belong to training.
    trainer = replace(config.trainer, transport="auto", trace=None, diagnose=None, stage_metrics=False)
    config = replace(config, dp=1, optim=replace(config.optim, ema=None), trainer=trainer, logger=LoggerConfig(name="jsonl"))
    checked = set_up(config, process)
    torch.set_num_threads(config.trainer.threads)
    with process.process_group(checked.device, config.trainer.timeout):
        return evaluate_in_group(checked, weights)


def evaluate_in_group(setup: Setup, weights: Path) -> dict[str, float | str]:
    """Implement :func:`evaluate` inside the process group. The pipeline ends with this function, before the group does."""
    _, test = setup.data()
    with raise_on_all_ranks():
        state = read_weights(weights)
    pipeline = setup.pipeline(setup.learning_rate(1))
    with raise_on_all_ranks():
        load_into(pipeline, state, str(weights))
    result = pipeline.evaluate(test, limited(test.batches, setup.config.trainer.limit_batches))
    return {"weights": str(weights), setup.unit: result.targets, **means(result, setup.unit, test.bytes_per_target)}


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    main()
