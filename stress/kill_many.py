"""Kill a random process at a random moment, many times, and compare the resumed runs with an uninterrupted one.

``python -m stress.kill_many --kills 200 --torchrun 10`` runs launch.train in four processes, with a checkpoint every three
microbatches, and kills at any time from start-up to the last file. The other processes then get SIGTERM, as from torchrun's agent,
and must end by themselves. ``--torchrun`` is the number of additional kills under torchrun, which restarts the processes
(``--max-restarts``). With ``--agents 2``, the processes are shared by two agents, as on two machines.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.nodes import free_port
from stress.frame import PATIENCE, RUN, assert_same, assert_undamaged, latest, parser_of, results, until
from tests.support.forked import Forked, used
from tests.support.processes import PIPES, environment

WORLD = 4
VARIANTS = ("trainer.transport=edge", "trainer.transport=lockstep")
"""Settings that may change at a restart without changing the results."""
AFTER_TRAINING = 3
"""Starts of a run that may be killed when its last checkpoint has been written."""
IMPORTS = 2.0
"""Processor seconds that a process under torchrun takes to import torch and Hydra."""


def kill_many(kills: int, folder: Path, seed: int = 0) -> Counter[str]:
    """Repeat runs until ``kills`` processes have been killed, and return the number of kills by moment.

    Raises:
        AssertionError: If a run hangs, leaves a damaged folder, or ends with other weights or metrics than an uninterrupted run.
    """
    chance, moments, runs = random.Random(seed), Counter[str](), 0
    seconds, expected = uninterrupted(folder)
    while moments.total() < kills:
        place, before, trained = folder / f"run{runs}", moments.total(), 0
        while not finished(place / "run"):
            # After the last checkpoint, a start consists of imports, which would get most kills.
            alive = moments.total() < kills and trained < AFTER_TRAINING
            moments.update(start(place, chance, seconds if alive else None))
            trained += latest(place / "run") == expected["latest"]
            assert_undamaged(place / "run", expected)
        assert_same(place / "run", expected)
        runs += 1
        print(f"run {runs}: killed {moments.total() - before} times, equal; {moments.total()} of {kills} kills", flush=True)
    return moments


def uninterrupted(folder: Path) -> tuple[float, dict[str, Any]]:
    """Run without kills, and return the processor seconds of one process and the results."""
    with Forked(folder / "warm", [*RUN, "dry_run=true"], WORLD) as warm:  # makes the fork server import torch
        warm.wait(PATIENCE)
    with Forked(folder / "whole", RUN, WORLD) as whole:
        seconds = used(whole.processes[1].pid)
        assert whole.wait(PATIENCE) == [0] * WORLD, whole.output()
    return seconds, results(folder / "whole" / "run")


def start(place: Path, chance: random.Random, seconds: float | None) -> list[str]:
    """Start or restart a run, and kill one process within its first ``seconds`` processor seconds.

    With ``seconds=None``, let the run finish.

    Returns:
        The moment of the kill, or nothing.
    """
    with Forked(place, [*RUN, chance.choice(VARIANTS)], WORLD) as started:
        if seconds is None:
            assert started.wait(PATIENCE) == [0] * WORLD, started.output()
            return []
        victim = chance.randrange(WORLD)
        used(started.processes[victim].pid, chance.uniform(0, seconds))
        started.signal(signal.SIGKILL, [victim])
        started.processes[victim].join()
        moment = state(place / "run")
        started.signal(signal.SIGTERM)
        statuses = started.wait(PATIENCE)
        assert "Traceback" not in started.output(), started.output()
        return [moment] if statuses[victim] == -signal.SIGKILL else []


def state(run: Path) -> str:
    """Return what a run was doing when one of its processes was killed."""
    if not (run / "checkpoints").exists():
        return "before the first checkpoint"
    if finished(run):
        return "after the last file"
    return "during a save" if any(run.glob("checkpoints/*.part")) else "between saves"


def finished(run: Path) -> bool:
    return (run / "summary.json").exists()


def under_torchrun(kills: int, folder: Path, seconds: float, expected: dict[str, Any], seed: int = 0, agents: int = 1) -> int:
    """Kill one process in each of ``kills`` runs under torchrun, which restarts them. Return the number of processes killed.

    Args:
        seconds: Processor seconds of a process, from :func:`uninterrupted`.
        expected: Results of :func:`uninterrupted`.
        agents: Number of torchrun's agents that share the :data:`WORLD` processes, as on so many machines. Each restarts its own
            after a failure, and all after one of another's.
    """
    chance, killed = random.Random(seed), 0
    for number in range(kills):
        place = folder / f"torchrun{agents}_{number}"
        place.mkdir()
        words = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3", "--nproc-per-node", str(WORLD // agents)]
        words += ["--nnodes", str(agents), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        words += ["--rdzv-id", place.name, "-m", "launch.train", *RUN]
        running = [subprocess.Popen(words, cwd=place, env=environment(), **PIPES) for _ in range(agents)]
        try:
            until(lambda: len(workers(running)) == WORLD, lambda: [agent.poll() for agent in running])  # noqa: B023
            victim = chance.choice(workers(running))
            used(victim, chance.uniform(0, IMPORTS + seconds))
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                killed += 1
            output = "".join("".join(agent.communicate(timeout=2 * PATIENCE)) for agent in running)
        finally:
            for pid in (*workers(running), *(agent.pid for agent in running)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for agent in running:
                agent.wait()
        assert [agent.returncode for agent in running] == [0] * agents, output
        assert_same(place / "run", expected)
        print(f"{place.name}: equal; {killed} killed", flush=True)
    return killed


def workers(agents: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Return the processes of all agents."""
    return [pid for agent in agents for pid in children(agent.pid)]


def children(pid: int) -> list[int]:
    """Return the child processes of a process, or none if it has ended."""
    with suppress(OSError):
        return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return []


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--torchrun", type=int, default=0, metavar="KILLS", help="additional kills under torchrun")
    parser.add_argument("--agents", type=int, default=1, help="agents of torchrun that share the processes, as on several machines")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        moments = kill_many(options.kills, Path(folder), options.seed)
        whole = uninterrupted(Path(folder, "again")) if options.torchrun else (0.0, dict[str, Any]())
        more = under_torchrun(options.torchrun, Path(folder), *whole, options.seed, options.agents)
    counts = ", ".join(f"{count} {moment}" for moment, count in moments.most_common())
    print(f"{moments.total()} kills ({counts}), {more} under torchrun, in {time.monotonic() - started:.0f} s:")
    print("every run ended with the weights, metrics and files of an uninterrupted run; no folder was damaged")


if __name__ == "__main__":
    main()
