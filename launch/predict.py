"""Classify image files with the trained network of a run.

``petra predict run=FOLDER [weights=FILE] [--trust] [key=value ...] IMAGE ...``

    run      folder of a run
    weights  file of exported weights, or folder of a checkpoint; the default is that of petra evaluate
    --trust  import code outside of petra that the run's configuration names as _target_
    key      any key of the run's configuration, such as trainer.precision
    IMAGE    JPEG or PNG file

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
from .evaluate import parse
from .run.saved import TRUST
from .run.weights import Weights
from .runtime.agent import this_process
from .runtime.terminal import command, words_or_help


@command
def main(arguments: list[str] | None = None) -> None:
    """Print a prediction for each image."""
    words = words_or_help(arguments, __doc__)
    if words is None:
        return
    with this_process() as process:
        images = [Path(word) for word in words if "=" not in word and word != TRUST]
        require(len(images) > 0, "command line", "image files", "none")
        _, weights, config = parse([word for word in words if "=" in word or word == TRUST], process)
        for path, label, probability in predictions(config, weights, images):
            print(f"{path}: {label}, {probability:.1%}", flush=True)


def predictions(config: Config, weights: Weights, images: Sequence[Path]) -> Iterator[tuple[Path, str, float]]:
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
