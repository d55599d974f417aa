"""Evaluates the network that a run has left, in one process or, started by torchrun, in many.

``python -m launch.evaluate run=FOLDER [weights=FILE] [key=value ...]``

    run      the folder of a run, which may still go on
    weights  a file of exported weights or the folder of a checkpoint; by default ema.* of the run's folder where there is one, else
             model.*, else its best checkpoint, with moving averages if it has some
    key      any key of the run's configuration, such as data.root, data.batch_size, trainer.device, trainer.limit_batches

Prints one JSON object: loss in nats, accuracies 0 … 1.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launch.config.errors import reason
from launch.config.schema import Config, LoggerConfig, to_config
from launch.run.build import set_up
from launch.run.resume import FOLDER
from launch.run.resume import weights as weights_in
from launch.runtime.rank import Place
from petra.distributed import together
from petra.errors import ConfigError, first_line
from petra.training import best_of, limited, load_into, means, newest
from petra.training.export import FORMATS


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return
    place = Place.from_environment()
    with place.reporting():
        folder, weights, config = parse(words)
        numbers = evaluate(config, weights or exported(folder), place)
        if place.first:
            print(json.dumps(numbers), flush=True)


def parse(words: list[str]) -> tuple[Path, Path | None, Config]:
    """The run's folder, the weights asked for, and the run's configuration with what the command line changes in it.

    Raises:
        ConfigError: no run folder, or settings that its configuration doesn't have.
    """
    for word in words:
        if "=" not in word:
            raise ConfigError(f"command line: found {word}, accepted are run=FOLDER and key=value")
    own = dict(word.split("=", 1) for word in words if word.startswith(("run=", "weights=")))
    if "run" not in own:
        raise ConfigError("run: not given, accepted is run=FOLDER, the folder of a run")
    folder = Path(own["run"])
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"run: found no config.yaml in {folder}, accepted is the folder of a run")
    changes = [word for word in words if not word.startswith(("run=", "weights="))]
    try:
        composed = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path), OmegaConf.from_dotlist(changes))
    except OmegaConfBaseException as error:
        raise ConfigError(reason(error, Config)) from error
    except Exception as error:  # a damaged file
        raise ConfigError(f"{path}: can't be read as a configuration ({first_line(error)})") from error
    assert isinstance(composed, DictConfig)
    return folder, Path(own["weights"]) if "weights" in own else None, to_config(composed)


def exported(folder: Path) -> Path:
    """The weights in a run's folder: their moving average where there is one; else its best checkpoint, or the newest.

    Raises:
        ConfigError: there are none.
    """
    for name in ("ema", "model"):
        for suffix in FORMATS.values():
            if (path := folder / f"{name}{suffix}").exists():
                return path
    if (checkpoint := best_of(folder / FOLDER) or newest(folder / FOLDER)) is not None:
        return checkpoint
    raise ConfigError(f"run: found neither exported weights nor a checkpoint in {folder}, accepted is the folder of a run")


def evaluate(config: Config, weights: Path, place: Place) -> dict[str, float | str]:
    """Loss and metrics of the test data under exported weights or a checkpoint, the same in every process.

    Raises:
        PetraError: the configuration, the data or the weights can't be used; the same in every process.
    """
    # The weights are averages already, or must not be; and what belongs to training in its processes is left aside, replicas too.
    trainer = replace(config.trainer, transport="auto", trace=None, diagnose=None, stage_metrics=False)
    config = replace(config, dp=1, optim=replace(config.optim, ema=None), trainer=trainer, logger=LoggerConfig(name="jsonl"))
    checked = set_up(config, place)
    torch.set_num_threads(config.trainer.threads)
    with place.joined(checked.device, config.trainer.timeout):
        _, test = checked.data()
        with together():
            state = weights_in(weights)
        pipeline = checked.pipeline(checked.learning_rate(1))
        with together():
            load_into(pipeline, state, str(weights))
        result = pipeline.evaluate(test, limited(test.batches, config.trainer.limit_batches))
        return {"weights": str(weights), checked.unit: result.targets, **means(result, checked.unit)}


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    main()
