"""Agreement on which replicas take part in a run, in a store that outlives all of them.

A *generation* is a list of replicas that train together, each as one *incarnation*: one start of all its processes. Within a
generation, replicas can only be lost. When the pipeline has drained, all processes agree either to continue, or on the next
generation, without lost replicas and with restarted ones. Every decision is one ``compare_set`` of the store, so all processes read
the same one, also a process that was believed dead: it finds itself excluded and ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from petra.distributed import is_communication_error
from petra.elastic.liveness import POLL, PRESENT, PROBE, Liveness, Member, watched
from petra.errors import CommunicationError, Interrupted, PetraError

DONE, FAILED = "done", "failed"


class MembershipChanged(PetraError):
    """The current generation has ended. All of its processes raise this error at the same drain, and join the next generation."""


@dataclass(frozen=True)
class Generation:
    """Replicas that train together.

    Attributes:
        number: Number of the generation, from 1.
        members: The replicas. The one that has taken part for longest is the first.
    """

    number: int
    members: tuple[Member, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Indices of the replicas."""
        return tuple(replica for replica, _ in self.members)

    @staticmethod
    def current(store: Store) -> Generation:
        """Read the last generation from the store. Generation 0 has no members."""
        number, members = json.loads(store.get("generation")) if store.check(["generation"]) else (0, ())
        return Generation(number, tuple((replica, incarnation) for replica, incarnation in members))


class Membership:
    """This process's view of the generations.

    Args:
        replica: Index of this process's replica.
        replicas: Number of replicas of the run.
        liveness: Which processes have ended.

    Attributes:
        store: The store that all processes share.
        process: Index of this process in its replica.
        generation: The generation that this process takes part in.
    """

    def __init__(self, replica: int, replicas: int, liveness: Liveness) -> None:
        self.replica, self.replicas, self.liveness = replica, replicas, liveness
        self.store: Store = liveness.store
        self.process = liveness.process
        self.generation = Generation(0, ())
        self._agreed: str | None = None  # key of the last operation on which this process has agreed

    def join(self, stop: Callable[[], bool] | None = None) -> Generation | None:
        """Wait until a generation contains this replica and all of its processes have entered it. None if the run has finished.

        The first generation consists of all replicas. So does a generation after all replicas of the one before were lost.

        Args:
            stop: Returns whether to stop waiting; None to wait in any case.

        Raises:
            CommunicationError: If the others have excluded this process, which they believed dead.
        """
        own = self.liveness.incarnation
        if self.process == 0:
            self.store.set(f"waiting/{self.replica}", own)
        while True:
            current = Generation.current(self.store)
            self._require_not_lost()
            if (stop is not None and stop()) or self.store.check(["finished"]):
                return None
            if all(self.liveness.is_lost(incarnation) for _, incarnation in current.members):
                waiting = self._waiting()
                if len(waiting) == self.replicas:
                    self._publish(current, waiting)
            elif own in dict(current.members).values() and self._enter(current):
                self.generation, self._agreed = current, None
                return current
            time.sleep(POLL)

    def conclude(self, phase: str, *, ok: bool = True, admit: bool = False) -> None:
        """Agree with all processes of the generation on how a phase has ended.

        Args:
            phase: Name of the phase, used once in a generation.
            ok: Whether this process has finished the phase.
            admit: Whether to take back restarted replicas.

        Raises:
            MembershipChanged: If a replica was lost or returns, or if a process has not finished the phase.
            CommunicationError: If the others have excluded this process, which they believed dead.
        """
        members, prefix = self.generation.members, f"{self.generation.number}/{phase}"
        self.store.set(f"{prefix}/{self.liveness.incarnation}/{self.process}", DONE if ok else FAILED)
        decision = f"{prefix}/decision"
        # A process may wait in the phase for the whole timeout, because another one has died.
        alive = self.liveness.wait_for(members, prefix, lambda: bool(self.store.check([decision])), timeouts=2)
        if not self.store.check([decision]):
            keys = [f"{prefix}/{i}/{p}" for _, i in alive for p in range(self.liveness.processes)]
            finished = all(self.store.get(key) == DONE.encode() for key in keys)
            joining = self._waiting() if admit else ()
            unchanged = len(alive) == len(members) and finished and not joining
            self.store.compare_set(decision, "", DONE if unchanged else json.dumps([*alive, *joining]))
        found = self.store.get(decision).decode()
        if found == DONE:
            return
        self._publish(self.generation, [(replica, incarnation) for replica, incarnation in json.loads(found)])
        self._require_not_lost()
        raise MembershipChanged(f"the replicas change after phase {phase} of generation {self.generation.number}")

    @contextmanager
    def concluding(self, phase: str, *, admit: bool = False) -> Iterator[None]:
        """Run a phase in the body of the ``with`` statement, and :meth:`conclude` it.

        An error of communication in the body, or the loss of a replica, means that the phase has not finished.
        """
        ok = True
        try:
            with watched(self._require_all):
                yield
        except Interrupted:
            raise
        except Exception as error:
            time.sleep(PROBE)  # a process that has just died may still accept a connection
            if not (is_communication_error(error) or self.liveness.any_lost(self.generation.members)):
                raise
            ok = False
        self.conclude(phase, ok=ok, admit=admit)

    def finish(self) -> None:
        """Tell replicas that wait for a generation that the run has finished."""
        self.store.set("finished", "")

    def leave(self) -> None:
        """Declare this process's replica lost, because one of its processes can't reach another."""
        with suppress(RuntimeError):
            self.liveness.declare_lost(self.liveness.incarnation)

    def agree(self, name: str, ok: bool, replicas: Sequence[int]) -> bool:
        """Return whether an operation has succeeded in this process of all the given replicas. All of them get the same answer.

        Args:
            name: Name of the operation, used once in a generation.
            ok: Whether it has succeeded here.
            replicas: The replicas that take part in it.
        """
        key, incarnations = f"{self.generation.number}/{name}", dict(self.generation.members)
        if not ok:
            self.store.compare_set(key, "", FAILED)
        elif self.store.add(f"{key}/count", 1) == len(replicas):
            self.store.compare_set(key, "", DONE)
            if self._agreed is not None:  # all have read it, because they have come to this operation
                self.store.delete_key(self._agreed)
                self.store.delete_key(f"{self._agreed}/count")
        until = time.monotonic() + self.liveness.timeout
        while not self.store.check([key]):
            if time.monotonic() > until or any(self.liveness.is_lost(incarnations[r], [self.process]) for r in replicas):
                self.store.compare_set(key, "", FAILED)
            time.sleep(POLL / 10)
        done = bool(self.store.get(key) == DONE.encode())
        self._agreed = key if done else None
        return done

    def remaining(self, name: str, replicas: Sequence[int]) -> list[int]:
        """Return those of ``replicas`` whose counterpart of this process still takes part. All of them get the same answer.

        Of two replicas that can't communicate, only one can remain: the same one for all pairs of their processes.

        Args:
            name: Name of the question, used once in a generation.

        Raises:
            CommunicationError: If the others have excluded this process.
        """
        self._require_not_lost()  # a process that outlives its replica for a moment must not decide
        prefix, incarnations = f"{self.generation.number}/{name}", dict(self.generation.members)
        decision = f"{prefix}/decision"
        if len(replicas) == 2:
            decision = f"{self.generation.number}/one of {sorted(replicas)}"
            alive = [(self.replica, self.liveness.incarnation)]
        else:
            self.store.set(f"{prefix}/{self.liveness.incarnation}/{self.process}", PRESENT)
            members = [(replica, incarnations[replica]) for replica in replicas]
            alive = self.liveness.wait_for(members, prefix, lambda: bool(self.store.check([decision])), [self.process])
        self.store.compare_set(decision, "", json.dumps([replica for replica, _ in alive]))
        found: list[int] = json.loads(self.store.get(decision))
        for replica in replicas:
            if replica not in found:
                self.liveness.declare_lost(incarnations[replica])
        self._require_not_lost()
        return found

    def _enter(self, generation: Generation) -> bool:
        """Wait until all processes have entered a generation. Return False if another one replaces it."""
        prefix = f"{generation.number}/entered"
        self.store.set(f"{prefix}/{self.liveness.incarnation}/{self.process}", PRESENT)
        alive = self.liveness.wait_for(generation.members, prefix, lambda: Generation.current(self.store) != generation)
        if Generation.current(self.store) != generation:
            return False
        if len(alive) < len(generation.members):
            self._publish(generation, alive)
        return len(alive) == len(generation.members)

    def _waiting(self) -> list[Member]:
        """Return the replicas that wait for a generation."""
        keys = {replica: f"waiting/{replica}" for replica in range(self.replicas)}
        found = [(replica, self.store.get(key).decode()) for replica, key in keys.items() if self.store.check([key])]
        members = dict(self.generation.members).values()
        return [member for member in found if member[1] not in members and not self.liveness.is_lost(member[1])]

    def _publish(self, current: Generation, members: Sequence[Member]) -> None:
        """Replace the current generation, unless another process has done so."""
        newest = {replica: (replica, incarnation) for replica, incarnation in members}
        replaced = json.dumps([current.number, current.members]) if current.number else ""
        self.store.compare_set("generation", replaced, json.dumps([current.number + 1, [*newest.values()]]))

    def _require_all(self) -> None:
        if self.liveness.any_lost(self.generation.members):
            raise CommunicationError("a replica was lost")

    def _require_not_lost(self) -> None:
        if self.liveness.declared_lost(self.liveness.incarnation):
            raise CommunicationError(f"replica {self.replica + 1}: excluded by the other replicas")
