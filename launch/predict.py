"""Classify image files with the trained network of a run.

Prepares each image as the run prepared its test images: centre crop, size, normalisation. Prints a line per image: the file, the
most probable class, and its probability. A class has a number, and a name if the data set has names.
"""

from __future__ import annotations

import torch

from petra.data import Preparation
from petra.errors import ModelError, PetraError, invalid, require

from .config.schema import GROUPS, keys
from .evaluate import read_run, run_parser
from .run.build import set_numerics
from .runtime.agent import this_process
from .runtime.terminal import command, path_argument

USED = ("model", "data.size", "trainer.device", "trainer.matmul_precision", "trainer.cudnn_benchmark")
"""Groups and keys of the run's configuration that a prediction uses."""


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a prediction for each image."""
    options = run_parser(__doc__, "IMAGE or key=value").parse_intermixed_args(arguments)
    changes = [word for word in options.words if _is_override(word)]
    images = [path_argument(word) for word in options.words if word not in changes]
    require(len(images) > 0, "command line", "JPEG or PNG files", "none")
    with this_process() as process:
        weights, config = read_run(options, changes, process, USED)
        device = process.device(config.trainer.device)
        set_numerics(config.trainer)
        if (preparation := weights.facts.get("preparation")) is None:
            raise invalid(str(weights.path), "weights of a run on images, with their normalisation", "none", PetraError)
        prepare, size = Preparation.from_dict(preparation), config.data.size
        require(size == prepare.size, "data.size", f"{prepare.size}, as the run prepared its images", size)
        network = weights.network(config).to(device)
        for path in images:
            with torch.no_grad():
                probabilities = network(prepare(path).to(device)).softmax(1)[0]
            expected = f"weights that give finite scores for {path}"
            require(bool(probabilities.isfinite().all()), str(weights.path), expected, "scores that are not finite", ModelError)
            label = int(probabilities.argmax())
            named = f"class {label} ({prepare.classes[label]})" if prepare.classes else f"class {label}"
            print(f"{path}: {named}, {float(probabilities[label]):.1%}", flush=True)


def _is_override(word: str) -> bool:
    """Return whether a word sets a key, rather than being a path that contains an equals sign."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.partition(".")[0] in (*keys(), *GROUPS) and not path_argument(word).exists()
