"""Evaluate the trained network of a run on the test data, in one process or in several under torchrun.

``petra evaluate run=FOLDER [weights=FILE] [pictures=N] [--trust] [key=value ...]``

    run      folder of a run, which may still be training
    weights  file of exported weights, or folder of a checkpoint. CHECKPOINT/average is the moving average in a checkpoint.
             Default: the newest of model.* and the run's checkpoints, by the microbatches done
    pictures for segmentation: write overlays of the first N test images, and a table of the classes, to FOLDER/pictures
    --trust  import code outside of petra that the run's configuration names as _target_
    key      any key of the run's configuration, such as data.root, data.batch_size, trainer.device or trainer.limit_batches

Prints one JSON object: loss in nats, accuracies between 0 and 1, for segmentation also the intersection over union of each class;
and to stderr which weights it has read, and after how many microbatches they were written.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from petra.errors import invalid, require

from .config.schema import GROUPS, Config
from .run.saved import TRUST, read_config
from .runtime.agent import this_process
from .runtime.rank import Process, integer
from .runtime.terminal import command, words_or_help

if TYPE_CHECKING:
    from .run.weights import Weights


@command
def main(arguments: list[str] | None = None) -> None:
    """Print the results of an evaluation."""
    words = words_or_help(arguments, __doc__)
    if words is None:
        return
    with this_process() as process:
        own, others = split(words, ("pictures",))
        pictures = integer("pictures", own["pictures"], 1) if own else 0
        folder, weights, config = parse(others, process)
        import torch

        from .run.evaluation import evaluate

        if arguments is None:
            torch.set_num_interop_threads(1)
        numbers = evaluate(config, weights, process, folder, pictures)
        if process.first:
            print(json.dumps(numbers), flush=True)


def split(words: list[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Return the values of a command's own keys among the words ``key=value``, and the other words."""
    own = [word for word in words if "=" in word and word.partition("=")[0] in names]
    return dict(word.split("=", 1) for word in own), [word for word in words if word not in own]


def parse(words: list[str], process: Process) -> tuple[Path, Weights, Config]:
    """Return the run's folder, the weights to read, and the run's configuration with the overrides on the command line.

    Raises:
        PetraError: If there is no folder of a run, it has no weights, or an override doesn't fit the configuration.
    """
    for word in words:
        require("=" in word or word == TRUST, "command line", "run=FOLDER and key=value", word)
    own, changes = split([word for word in words if word != TRUST], ("run", "weights"))
    require("run" in own, "run", "the folder of a run (run=FOLDER)", "nothing")
    folder = Path(own["run"])
    path = folder / "config.yaml"
    require(path.is_file(), "run", "the folder of a run", f"{folder} without a config.yaml")
    for name, _, value in (word.partition("=") for word in changes):
        require(name not in GROUPS, name, f"single keys of the run's configuration ({name}.KEY=VALUE)", value)
    config = read_config(path, dotlist(changes), trusted=TRUST in words)
    from .run.weights import Weights

    weights = Weights(Path(own["weights"])) if "weights" in own else Weights.newest(folder, "run")
    if process.first:
        weights.print_choice(None if "weights" in own else folder)
    return folder, weights, config


def dotlist(words: list[str]) -> DictConfig:
    """Return overrides ``key=value``.

    Raises:
        ConfigError: If a value is not YAML.
    """
    overrides = OmegaConf.create()
    for word in words:
        try:
            overrides.merge_with_dotlist([word])
        except YAMLError as error:
            key, _, value = word.partition("=")
            raise invalid(key, "a value in YAML; quote one that begins with a special character", value) from error
    return overrides


if __name__ == "__main__":
    main()
