"""Evaluate the trained network of a run on the test data, in one process or in several under torchrun.

Prints one JSON object: loss in nats, accuracies between 0 and 1, for segmentation also the intersection over union of each class;
and to stderr which weights it has read, and after how many microbatches they were written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from typing import TYPE_CHECKING

from petra.errors import require

from .config.schema import GROUPS, Config
from .config.words import keys_of, read_overrides
from .run.folder import TRUST, read_config
from .runtime.agent import this_process
from .runtime.rank import Process
from .runtime.terminal import command, parser_for, path_argument

if TYPE_CHECKING:
    from .run.weights import SavedWeights

WEIGHTS = """file of exported weights, or folder of a checkpoint; CHECKPOINT/average is the moving average in a checkpoint
(default: the newest of model.* and the run's checkpoints, by the microbatches done)"""

USED = (
    *("model", "data", "method", "seed", "trainer.stages", "trainer.device", "trainer.precision", "trainer.exact_streams"),
    *("trainer.message_format", "trainer.channels_last", "trainer.matmul_precision", "trainer.cudnn_benchmark", "trainer.compile"),
    *("trainer.limit_batches", "trainer.memory_limit", "trainer.timeout"),
)
"""Groups and keys of the run's configuration that an evaluation uses, also to check others of them."""


@command
def main(arguments: list[str] | None = None) -> None:
    """Print the results of an evaluation."""
    options = run_parser(__doc__).parse_intermixed_args(arguments)
    with this_process() as process:
        weights, config = read_run(options, options.words, process, USED)
        import torch

        from .run.weights import evaluate

        if arguments is None:
            torch.set_num_interop_threads(1)
        numbers = evaluate(config, weights, process)
        if process.first:
            print(json.dumps(numbers), flush=True)


def run_parser(text: str | None, words: str = "key=value", *, weights: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command that reads the folder of a run.

    Args:
        text: Docstring of the command.
        words: What follows the folder of the run.
        weights: Whether the command has a flag for other weights than the newest.
    """
    parser = parser_for(text, "key=value is a key of the run's configuration, such as data.root.")
    parser.add_argument("run", type=path_argument, metavar="RUN", help="folder of a run, which may still be training")
    parser.add_argument("words", nargs="*", metavar=words).required = False
    if weights:
        parser.add_argument("--weights", type=path_argument, metavar="FILE", help=WEIGHTS)
    parser.add_argument(TRUST, action="store_true", help="import code outside of petra that the run's configuration names")
    return parser


def read_run(
    options: argparse.Namespace, changes: list[str], process: Process, used: Collection[str]
) -> tuple[SavedWeights, Config]:
    """Return the weights to read, and the run's configuration with the overrides on the command line.

    Args:
        used: Groups and keys that the command uses. Overrides of others are refused.

    Raises:
        PetraError: If there is no folder of a run, it has no weights, or an override doesn't fit the configuration.
    """
    folder, config = options.run, run_config(options, changes)
    for word in changes:
        (key,), value = keys_of([word]), word.partition("=")[2]
        expected = f"nothing, since the command uses {', '.join(used)} of a configuration"
        require(key in used or key.partition(".")[0] in used, key, expected, value)
    from .run.weights import SavedWeights

    weights = SavedWeights.at(folder, "command line") if options.weights is None else SavedWeights(options.weights)
    if process.first:
        weights.print_choice(folder, chosen=options.weights is None)
    return weights, config


def run_config(options: argparse.Namespace, changes: list[str]) -> Config:
    """Return the configuration of the run with the overrides on the command line.

    Raises:
        PetraError: If there is no folder of a run, or an override doesn't fit its configuration.
    """
    folder = options.run
    require("=" not in str(folder) or folder.is_dir(), "command line", "the folder of a run first (petra COMMAND RUN)", folder)
    file = folder / "config.yaml"
    require(file.is_file(), "command line", "the folder of a run", f"{folder} without a config.yaml")
    for word in changes:
        name, _, value = word.partition("=")
        require(name not in GROUPS, name, f"single keys of the run's configuration ({name}.KEY=VALUE)", value)
    overrides = read_overrides(changes)
    return read_config(file, overrides, trusted=options.trust)
