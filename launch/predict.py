"""Classify image files with the trained network of a run.

Prepares each image as the run prepared its test images: centre crop, size, normalisation. Prints a line per image: the file, the
most probable class, and its probability. A class has a number, and a name if the data set has names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from petra.data import Preparation
from petra.errors import ModelError, PetraError, invalid, require

from .config.schema import Config
from .evaluate import read_run, run_parser
from .run.weights import SavedWeights
from .runtime.agent import this_process
from .runtime.terminal import command


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a prediction for each image."""
    options = run_parser(__doc__, "IMAGE or key=value").parse_intermixed_args(arguments)
    with this_process() as process:
        images = [Path(word) for word in options.words if "=" not in word]
        require(len(images) > 0, "command line", "JPEG or PNG files", "none")
        weights, config = read_run(options, [word for word in options.words if "=" in word], process)
        for path, label, probability in predictions(config, weights, images):
            print(f"{path}: {label}, {probability:.1%}", flush=True)


def predictions(config: Config, weights: SavedWeights, images: Sequence[Path]) -> Iterator[tuple[Path, str, float]]:
    """Yield each file with its most probable class and the class's probability.

    Args:
        config: Configuration of the run.
        weights: Weights of the run.
        images: JPEG or PNG files.

    Raises:
        PetraError: If the weights or an image can't be used.
    """
    if (preparation := weights.facts.get("preparation")) is None:
        raise invalid(str(weights.path), "weights of a run on images, with their normalisation", "none", PetraError)
    prepare = Preparation.from_dict(preparation)
    network = weights.network(config)
    for path in images:
        with torch.no_grad():
            probabilities = network(prepare(path)).softmax(1)[0]
        finite = bool(probabilities.isfinite().all())
        require(finite, str(weights.path), f"weights that give finite scores for {path}", "scores that are not finite", ModelError)
        label = int(probabilities.argmax())
        named = f"class {label} ({prepare.classes[label]})" if prepare.classes else f"class {label}"
        yield path, named, float(probabilities[label])


if __name__ == "__main__":
    main()
