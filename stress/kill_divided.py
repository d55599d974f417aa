"""Kill runs of two replicas of two stages of two processes each, and resume them with one or two replicas.

``python -m stress.kill_divided --kills 9``: a random process of eight gets SIGKILL in the backward pass of a random microbatch. The
others must end by themselves. The run continues from its newest checkpoint with one replica (four processes), is killed again,
continues with two, and so on. Losses and weights must be those of a run without kills, within rounding.
"""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from petra.training import Checkpoints, newest, restore
from stress.frame import PATIENCE, parser_of
from tests.engine.test_tensor_parallel import TEXTS, pipeline
from tests.support.nets import hook
from tests.support.processes import Ended, start

EVERY, LAST = 5, 60
"""Microbatches between two checkpoints, of which every second has an update half done (k = 2), and of the whole run."""
Outcome = tuple[dict[int, float], dict[str, Tensor]]


def train(rank: int, folder: Path, dp: int, victim: int, moment: int) -> Outcome:
    """Continue the run in a folder. Return the losses by microbatch, and the weights of this process's stage.

    Args:
        victim: Rank of the process that kills itself.
        moment: In the backward pass of this microbatch.
    """
    torch.set_num_threads(1)
    made, store, losses = pipeline("revgpt", 2, dp=dp), Checkpoints(folder), dict[int, float]()
    if (path := newest(folder)) is not None:
        restore(made, path)

    def kill(stage: int, m: int, *_: object) -> None:
        if (rank, m) == (victim, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    with made.hooks.attached(hook(backward_end=kill)):
        while made.microbatches_done < LAST:
            losses[made.microbatches_done] = made.train(TEXTS, EVERY).loss
            store.save(made, {})
    return losses, made.state_dict()


def run(folder: Path, dp: int, victim: int = -1, moment: int = -1) -> tuple[Ended, float]:
    """Run :func:`train`, and return how the processes ended, and after how many seconds."""
    begun = time.monotonic()
    ended = start(4 * dp, train, folder / f"{begun}", folder / "checkpoints", dp, victim, moment, timeout=PATIENCE, grace=PATIENCE)
    return ended, time.monotonic() - begun


def kill_divided(kills: int, folder: Path, seed: int = 0) -> None:
    """Kill and resume runs until ``kills`` processes have been killed.

    Raises:
        AssertionError: If a process hangs, or a run has other losses or weights than one without kills.
    """
    chance, killed = random.Random(seed), 0
    expected = joint(run(folder / "whole", 2)[0])
    while killed < kills:
        place = folder / f"run{killed}"
        for turn in range(3):
            done = int(path.name) if (path := newest(place / "checkpoints")) else 0
            dp, moment = 2 - turn % 2, chance.randrange(done, min(done + 20, LAST))
            ended, seconds = run(place, dp, victim := chance.randrange(4 * dp), moment)
            assert ended.statuses[victim] == -signal.SIGKILL, ended.outputs
            assert None not in ended.statuses, ended.outputs
            killed += 1
            print(f"killed rank {victim} of {4 * dp} in microbatch {moment}; all ended after {seconds:.0f} s", flush=True)
        losses, weights = joint(run(place, 2 - killed % 2)[0])
        torch.testing.assert_close(losses, {m: expected[0][m] for m in losses}, rtol=1e-5, atol=0)
        worst = max(float((weights[key] - value).abs().max() / value.abs().max()) for key, value in expected[1].items())
        assert worst < 1e-4, worst
        print(f"finished from microbatch {min(losses)} with {2 - killed % 2} replica(s); weights differ by {worst:.1e}", flush=True)


def joint(ended: Ended) -> Outcome:
    """Return the losses of a run, and the weights of all stages."""
    results = ended.require()
    return results[0][0], {key: value for _, weights in results for key, value in weights.items()}


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=9, help="number of kills (default: 9)")
    parser.add_argument("--seed", type=int, default=0, help="seed of processes and microbatches (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kill_divided(options.kills, Path(folder), options.seed)


if __name__ == "__main__":
    main()
