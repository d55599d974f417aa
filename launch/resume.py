"""Resume a run from its last checkpoint, with its own configuration: ``petra resume RUN``, also with ``--nproc N``.

Keys on the command line change the run from here on, such as ``trainer.epochs=20``. The number of processes may be another one.
"""

from __future__ import annotations

from dataclasses import replace

from petra.errors import require

from .config.compose import Job
from .config.schema import AUTO, Config
from .config.words import keys_of
from .evaluate import run_config, run_parser
from .run.folder import CHECKPOINTS, changes_results
from .runtime.terminal import command
from .train import train_or_start


@command
def main() -> None:
    """Train in this process, one of those that torchrun has started, or start the processes that do."""
    train_or_start("resume", lambda: [Job(config, ()) for config in read()])


def read() -> list[Config]:
    """Return the configuration of the run on the command line.

    The keys on the command line are those that may change what is computed (``resume_change``): nobody gives them by accident.

    Raises:
        PetraError: If there is no folder of a run with a checkpoint, or an override doesn't fit the configuration.
    """
    options = run_parser(__doc__, weights=False).parse_intermixed_args()
    config = run_config(options, options.words)
    saved, given = options.run / CHECKPOINTS, keys_of(options.words)
    require("run_dir" not in given, "run_dir", f"the folder of the run, {options.run}, or nothing", config.run_dir)
    for key in ("init_from", "init_skip"):
        expected = f"nothing, since the run resumes from its checkpoint (petra train {key}=... starts another run)"
        require(key not in given, key, expected, getattr(config, key))
    require("resume" not in given or config.resume == AUTO, "resume", f"{AUTO} or nothing", config.resume)
    require(any(saved.glob("*/")), "command line", "the folder of a run with a checkpoint", f"{options.run} without one")
    changed = sorted({*(config.resume_change or ()), *filter(changes_results, given)})
    return [replace(config, run_dir=str(options.run), resume=AUTO, resume_change=changed or None)]
