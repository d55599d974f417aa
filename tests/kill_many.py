"""Kills a random process at a random moment, many times, and compares what the resumed runs give with an uninterrupted one.

``python -m tests.kill_many --kills 200``
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from petra import Pipeline
from petra.together import gathered
from petra.training import Checkpoints, JsonLines, Trainer, newest, restore
from petra.training.checkpoint import checkpoints, verify
from tests.nets import RandomStream, mixed_net
from tests.processes import context

WORLD, EPOCHS = 4, 2
PATIENCE, GRACE = 120, 3
"""Seconds that a run may take, and that the others have once one has been killed: torchrun, too, ends them after a while."""


class Epochs(RandomStream):
    """Random microbatches in epochs of eleven, which neither k nor the interval of checkpoints divides."""

    batches_per_epoch, batches = 11, 2


def train(rank: int, folder: str, attempt: int) -> None:
    """One process of a run that goes on from its last checkpoint, where there is one, to its end."""
    torch.set_num_threads(1)
    run = Path(folder)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{run}/store{attempt}", rank=rank, world_size=WORLD, timeout=timeout)
    data = Epochs()
    pipeline = Pipeline(
        mixed_net(dropout=0.1),
        data.spec,
        k=3,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9),
        learning_rate=lambda t: 0.02 / (1 + t / 50),
        transport="lockstep" if attempt % 2 else "edge",
    )
    found = gathered(newest(run / "checkpoints") if rank == 0 else None)[0]
    trainer = Trainer(pipeline, data, data, lambda t: 0.02, checkpoints=Checkpoints(run / "checkpoints"), every=4)  # type: ignore[arg-type]
    if found is not None:
        trainer.resume(restore(pipeline, found)["trainer"])
    if rank == 0:
        trainer.loggers = [JsonLines(run / "metrics.jsonl", [epoch.row() for epoch in trainer.history])]
    trainer.fit(EPOCHS)
    torch.save(pipeline.state_dict(), run / f"weights{rank}.pt")
    dist.destroy_process_group()


def attempt(run: Path, number: int, victim: tuple[int, float] | None) -> tuple[bool, float]:
    """Starts the run's processes and kills the victim, a rank, after so many seconds; whether they finished, and the seconds."""
    processes = [context.Process(target=train, args=(rank, str(run), number)) for rank in range(WORLD)]
    started = time.monotonic()
    deadline = started + PATIENCE
    for process in processes:
        process.start()
    try:
        if victim is not None:
            processes[victim[0]].join(victim[1])
            processes[victim[0]].kill()
            deadline = time.monotonic() + GRACE
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()] if victim is None else []
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not hung, f"processes {hung} of {WORLD} still ran after {PATIENCE} s"
    return all(process.exitcode == 0 for process in processes), time.monotonic() - started


def outcome(run: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Final weights, and the rows of metrics without their times."""
    weights = {k: v for rank in range(WORLD) for k, v in torch.load(run / f"weights{rank}.pt", weights_only=True).items()}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return weights, [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def kill_many(kills: int, folder: Path, seed: int = 0) -> int:
    """Runs after runs until so many processes have been killed; the number of runs.

    Raises:
        AssertionError: a run hung, left a damaged checkpoint, or ended with other weights or metrics than one without kills.
    """
    chance = random.Random(seed)
    warm = context.Process(target=int)  # the fork server imports torch now, not in the run that is timed
    warm.start()
    warm.join()
    whole = folder / "whole"
    whole.mkdir()
    finished, seconds = attempt(whole, 0, None)
    assert finished
    weights, rows = outcome(whole)
    done = runs = 0
    while done < kills:
        run, number = folder / f"run{runs}", 0
        run.mkdir()
        finished = False
        while not finished:
            victim = (chance.randrange(WORLD), chance.uniform(0.3, 0.9) * seconds) if done < kills else None
            finished, _ = attempt(run, number, victim)
            number += 1
            done += not finished
            for path in checkpoints(run / "checkpoints"):
                verify(path)
        found, found_rows = outcome(run)
        assert found.keys() == weights.keys()
        different = [key for key, value in weights.items() if not torch.equal(value, found[key])]
        assert not different, f"run {runs}, killed {number - 1} times: {different[0]}"
        assert found_rows == rows
        runs += 1
        print(f"run {runs}: killed {number - 1} times, equal; {done} of {kills} kills", flush=True)
    return runs


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = kill_many(options.kills, Path(folder), options.seed)
    print(f"{options.kills} kills in {runs} runs: all ended with the weights and metrics of a run without kills")


if __name__ == "__main__":
    main()
