"""Kill or stop a random process of a run with replicas at a random moment, many times, and compare the replicas afterwards.

``python -m stress.kill_replicas --kills 50 --processes 4`` trains with two replicas of two processes each. After each kill, it
waits until the lost replica has returned. Every drain of every process records a digest of weights, optimizer state and running
statistics, which must be equal in all replicas.
"""

import hashlib
import json
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from launch.elastic.processes import ReplicaProcesses
from launch.runtime import reporting
from petra.elastic.replicas import ElasticReplicas
from petra.training import Trainer
from petra.training.state import state_of
from stress.frame import parser_of, until
from tests.support import forked
from tests.support.processes import context

RUN = (
    *("data=synthetic", "data.images=64", "data.size=16", "model.width=0.0625", "trainer.device=cpu", "trainer.epochs=100000"),
    *("trainer.timeout=30", "checkpoint.every=6", "run_dir=run", "resume=auto", "cluster.elastic=true", "k=2"),
)
"""A run that never ends by itself. Two updates of two microbatches fit into the interval of drains three times."""


class ForkedProcess:
    """A process of launch.train, forked from a process that has imported torch. See :class:`launch.elastic.processes.Started`."""

    def __init__(self, folder: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> None:
        arguments = ("-".join(place(environment)), str(folder), [*overrides], dict(environment), note_digests)
        self._process = context.Process(target=forked.main, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def place(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the replica of a process, and its rank there."""
    return environment["PETRA_REPLICA"], environment["RANK"]


class Replicas:
    """The processes of a run with replicas. All of them are killed when the context ends.

    Args:
        folder: Working directory of the processes.
        replicas: Number of replicas.
        processes: Number of processes of each replica.
        overrides: Further overrides of launch.train.
    """

    def __init__(self, folder: Path, replicas: int, processes: int, overrides: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        words = [*RUN, f"dp={replicas}", f"data.batch_size={2 * replicas}", *overrides]

        def start(environment: Mapping[str, str]) -> ForkedProcess:
            return ForkedProcess(folder, words, environment)

        self.replicas = [ReplicaProcesses(start, index, processes, self._store.port) for index in range(replicas)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.signal(signal.SIGKILL)
        for replica in self.replicas:
            while any(process.poll() is None for process in replica.running):
                time.sleep(0.01)

    def stop(self) -> None:
        """Ask all replicas to stop, and wait until they have."""
        self.signal(signal.SIGTERM)
        until(self.ended, self.output, between=lambda: self.supervise(restart=False))
        assert {replica.status for replica in self.replicas} == {reporting.STOPPED}, self.output()

    def signal(self, number: signal.Signals) -> None:
        for replica in self.replicas:
            replica.signal(number)

    def ended(self) -> bool:
        return all(replica.status is not None for replica in self.replicas)

    def wait_for(self, event: str, count: int) -> dict[str, Any]:
        """Wait until ``count`` events of a kind have been recorded, and return the last of them."""

        def found() -> list[dict[str, Any]]:
            return [row for row in self.events() if row["event"] == event]

        until(lambda: len(found()) >= count, self.output, between=self.supervise)
        return found()[-1]

    def supervise(self, *, restart: bool = True) -> None:
        for replica in self.replicas:
            replica.supervise(restart=restart)
        time.sleep(0.01)

    def events(self) -> list[dict[str, Any]]:
        """Return the rows of replicas.jsonl."""
        return [json.loads(line) for line in whole_lines(self.folder / "run" / "replicas.jsonl")]

    def trained(self) -> int:
        """Return the last clock of which any process has written a digest."""
        return max((clock for path in self.folder.glob("digests*") for clock in digests(path)), default=0)

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted([*self.folder.glob("out*"), *self.folder.glob("err*")]))

    def assert_equal(self) -> int:
        """Assert that all replicas had equal states after every drain. Return the number of drains of several replicas."""
        found: dict[tuple[str, int], set[str]] = defaultdict(set)
        several: dict[int, set[str]] = defaultdict(set)
        for path in self.folder.glob("digests*"):
            _, replica, process = path.name.split("-")
            for clock, digest in digests(path).items():
                found[process, clock].add(digest)
                several[clock].add(replica)
        different = [key for key, values in found.items() if len(values) > 1]
        assert not different, f"process and microbatch {different[0]}"
        return sum(len(replicas) > 1 for replicas in several.values())


def kill_many(run: Replicas, kills: int, chance: random.Random, longest: float = 1.0) -> list[dict[str, Any]]:
    """Kill ``kills`` processes, one after the other. Wait each time until the replica has returned, and return these events."""
    found = []
    while run.trained() == 0:
        run.supervise()
        assert all(replica.restarts == 0 for replica in run.replicas), run.output()
    for number in range(1, kills + 1):
        drained = run.trained() if chance.random() < 0.5 else -1
        while run.trained() == drained:  # compare the replicas before every second kill
            run.supervise()
        until = time.monotonic() + chance.uniform(0, longest)
        while time.monotonic() < until:
            run.supervise()
        chance.choice(chance.choice(run.replicas).running).send_signal(signal.SIGKILL)
        found.append(run.wait_for("back", number))
        assert sum(row["event"] == "lost" for row in run.events()) == number, run.output()
        print(f"{number} of {kills}: {found[-1]}", flush=True)
    return found


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without one that is being written, or none if the file does not exist."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def digests(path: Path) -> dict[int, str]:
    """Return the digests that a process has written, by clock."""
    return {int(clock): digest for clock, digest in map(str.split, whole_lines(path))}


def note_digests(name: str) -> None:
    """Make this process write a digest of its state at each drain, and report errors at once."""
    reporting.ORIGIN_WAIT = reporting.REPORT_WAIT = 0.1
    save = Trainer._save_and_stop

    def noting_save(self: Trainer, score: float | None) -> None:
        assert isinstance(self.pipeline.replicas, ElasticReplicas)
        digest = hashlib.sha256()
        for key, value in sorted(state_of(self.pipeline, every_replica=True).items()):
            digest.update(key.encode())
            digest.update(value.contiguous().numpy().tobytes())
        with Path(f"digests-{name}").open("a") as notes:
            notes.write(f"{self.pipeline.microbatches_done} {digest.hexdigest()}\n")
        save(self, score)

    Trainer._save_and_stop = noting_save  # type: ignore[method-assign]


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=4, help="number of processes, of both replicas together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Replicas(Path(folder), 2, options.processes // 2) as run:
        kills = kill_many(run, options.kills, random.Random(options.seed))
        run.stop()
        drains, trained = run.assert_equal(), run.trained()
    print(f"{len(kills)} kills, {options.processes} processes, {trained} microbatches, {time.monotonic() - started:.0f} s")
    print(f"at most {sum(row['missed']['samples'] for row in kills)} samples missed; replicas equal after {drains} drains")


if __name__ == "__main__":
    main()
