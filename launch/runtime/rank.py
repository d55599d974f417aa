"""One process among those that torchrun started: where it stands, how it joins the others, how they fail together."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from threading import Thread
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from petra.errors import CommunicationError, ConfigError, Interrupted, NumericsError, PetraError

PATIENCE = 30.0
"""Seconds for which a failing process lets the first one fail before it: torchrun stops all the others as soon as one has."""
GRACE = 1.0
"""Seconds for which a process that lost its neighbour lets others tell their error first."""
STOPPED = 75
"""Exit status of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h."""


_joins = count()
"""Times that this process has joined the others."""


@dataclass(frozen=True)
class Place:
    """This process among all, as torchrun's environment variables say; alone without them."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @staticmethod
    def from_environment() -> Place:
        rank, world, local_rank, local_world = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
        )
        return Place(rank, world, local_rank, local_world)

    @property
    def first(self) -> bool:
        """Whether this is the process of the first stage, the one that keeps the records."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this process: a GPU each, or the CPU.

        Where a process sees one GPU, that is its own: some clusters show each process another one. Whether they did is known, and
        required, as the processes join.

        Raises:
            ConfigError: on all processes of a machine if it has too few GPUs, since NCCL refuses two processes on one.
        """
        if name not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"trainer.device: found {name}, accepted are auto, cpu, cuda")
        if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        gpus = torch.cuda.device_count()
        if gpus == 1:
            return torch.device("cuda", 0)
        if gpus < self.local_world:
            raise ConfigError(
                f"trainer.device: found {name} for {self.local_world} process(es) and {gpus} GPU(s) on this machine, "
                "accepted are a GPU for each process, or trainer.device=cpu"
            )
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def joined(self, device: torch.device, timeout: float) -> Iterator[None]:
        """Binds the device, then joins the process group, if there is more than one process.

        Args:
            timeout: seconds for which communication may stall before it fails.

        Raises:
            ConfigError: in every process if two have the same GPU.
        """
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        if "WORLD_SIZE" not in os.environ:
            yield
            return
        patience = timedelta(seconds=timeout)
        store, _, _ = next(rendezvous("env://", timeout=patience))
        # torchrun keeps its store when it starts processes again; those must not read what dead ones have left there.
        # Nor may a sweep's next run read what this one leaves.
        store = PrefixStore(f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}_{next(_joins)}", store)
        if on_gpu:
            require_own(PrefixStore("gpu", store), self.rank, self.world, str(torch.cuda.get_device_properties(device).uuid))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=patience,
            device_id=device if on_gpu else None,
            store=store,
            rank=self.rank,
            world_size=self.world,
        )
        yield
        dist.destroy_process_group()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Ends the process on an error that its user can act on, told once for all processes: by the one where it began.

        Status 2; 75 for a run that was asked to stop and can go on; 130 for Ctrl-C before training. Others keep their traceback.
        """
        try:
            yield
        except Interrupted as stopped:
            if self.first:
                print(stopped, file=sys.stderr, flush=True)
            sys.exit(STOPPED)
        except PetraError as error:
            began_here = error.origin if isinstance(error, NumericsError) else self.first
            self._end(str(error), began_elsewhere=isinstance(error, CommunicationError), patience=0 if began_here else PATIENCE)
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            where = getattr(error, "__notes__", ["before training"])[0]
            if is_memory(error):
                self._end(f"out of memory {where}: {reason(error)}", began_elsewhere=False)
            if not is_communication(error):
                if speaks_first():
                    raise
                sys.exit(1)
            self._end(f"communication between processes, {where}: {reason(error)}", began_elsewhere=True)

    def _end(self, message: str, *, began_elsewhere: bool, patience: float = 0) -> NoReturn:
        """Tells an error unless another process has told one, and ends this process; a lost message is told on every machine."""
        # torchrun stops all others as soon as one has failed; this process is ending anyway, and may be the one to say why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN) if began_elsewhere else None
        time.sleep(GRACE if began_elsewhere else patience)
        if speaks_first(here=began_elsewhere):
            hint = "; another process has died, hangs or can't be reached" if began_elsewhere else ""
            print(f"error: {message}{hint}", file=sys.stderr, flush=True)
        if began_elsewhere and dist.is_initialized():
            sys.stdout.flush()
            os._exit(2)  # gloo would wait for the lost process once more, for as long again
        sys.exit(2)

    @contextmanager
    def composing(self) -> Iterator[None]:
        """Lets only the first process tell what is asked of Hydra or wrong with a configuration, and fail first."""
        if self.first:
            yield
            return
        try:
            with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
        except SystemExit:
            time.sleep(PATIENCE)
            raise


def require_own(store: Store, rank: int, world: int, gpu: str) -> None:
    """Compares the GPUs of all processes, each of which calls this with its own.

    Raises:
        ConfigError: in every process if two have the same; NCCL would name neither.
    """
    store.set(str(rank), gpu)
    gpus = [store.get(str(r)).decode() for r in range(world)]
    for r, found in enumerate(gpus):
        if (first := gpus.index(found)) < r:
            raise ConfigError(
                f"trainer.device: found GPU {found} in processes {first} and {r}, "
                "accepted are a GPU for each process, or trainer.device=cpu"
            )


def is_communication(error: Exception) -> bool:
    """Whether torch.distributed raised it: gloo has no error class of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def is_memory(error: Exception) -> bool:
    """Whether memory couldn't be had, on the device or on the host, for which torch has no error class of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def reason(error: Exception) -> str:
    """The first sentence of torch's text, without the line of its source."""
    text = (str(error) or "no more can be had").splitlines()[0]
    text = re.sub(r"^\[[^\]]*\] (err == 0\. DefaultCPUAllocator: )?", "", text)
    return re.sub(r"(?<!out of memory)\. .*", "", text)


def speaks_first(*, here: bool = False) -> bool:
    """Whether no other process has asked this before, as far as they can be reached within a second.

    Args:
        here: ask only those of this machine, if torchrun has started them.
    """
    first_here = _first_here()
    if first_here is False or (first_here and here):
        return first_here
    answers = [True]

    def ask() -> None:
        with suppress(RuntimeError):
            answers[0] = _get_default_store().add("told", 1) == 1

    if dist.is_initialized():
        asking = Thread(target=ask, daemon=True)  # a store on a host that can't be reached any more keeps silent for minutes
        asking.start()
        asking.join(GRACE)
    return answers[0]


def _first_here() -> bool | None:
    """By the folder that torchrun makes for the errors of the processes that it starts together; None without one."""
    if not (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return None
    try:
        Path(file).parents[1].joinpath("told").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return None
    return True
