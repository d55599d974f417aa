"""The rank of this process among those that torchrun started, its device, and its process group."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from traceback import clear_frames
from typing import TYPE_CHECKING

from petra.errors import Interrupted, invalid, require, user_path

from .machine import check_names

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

START = timedelta(seconds=60)
"""Time in which all ranks must start, however short the timeout of communication is. Programs load at different speeds."""
POLL = 0.02
"""Seconds between two looks of rank 0 at the store."""
NETWORK = {
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Variables that every run sets: NCCL's warnings, and a dump of the last 2000 operations if one exceeds ``trainer.timeout``."""
LAUNCHERS = {
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "PMI": ("PMI_RANK", "PMI_SIZE"),
    "PMIx": ("PMIX_RANK",),
    "PALS": ("PALS_RANKID", "PALS_SIZE"),
    "JSM": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "Kubeflow, which petra node joins": ("PET_NODE_RANK", "PET_NNODES"),
}
"""Variables of programs that start several tasks: rank of a task, then number of tasks (the first that is set counts)."""
DUMPS = "TORCH_FR_DUMP_TEMP_FILE"
_group_numbers = count()
"""Number of the next process group of this process."""


@dataclass(frozen=True)
class Process:
    """Rank of this process, and the number of processes.

    Attributes:
        rank: Rank among all processes of the run.
        world: Number of processes of the run.
        local_rank: Rank among the processes on this machine.
        local_world: Number of processes on this machine.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int

    @staticmethod
    def from_environment() -> Process:
        """Read torchrun's environment variables. Without RANK and WORLD_SIZE, this process is the only one.

        Raises:
            ConfigError: If a variable is missing or has an invalid value, or this is one of several tasks that know nothing of each
                other.
        """
        if not {"RANK", "WORLD_SIZE"} & os.environ.keys():
            require_one_task()
            return Process(rank=0, world=1, local_rank=0, local_world=1)

        def variable(name: str, least: int, most: int | None = None, default: str | None = None, note: str = "") -> int:
            return integer(f"environment variable {name}", os.environ.get(name, default), least, most, note)

        world = variable("WORLD_SIZE", 1)
        process = Process(
            rank=variable("RANK", 0, world - 1, note=" (one of WORLD_SIZE processes)"),
            world=world,
            local_rank=variable("LOCAL_RANK", 0, default="0"),
            local_world=variable("LOCAL_WORLD_SIZE", 1, world, default="1"),
        )
        expected = f"the address of rank 0 with WORLD_SIZE={world}"
        require(bool(os.environ.get("MASTER_ADDR")), "environment variable MASTER_ADDR", expected, "nothing")
        variable("MASTER_PORT", 1, 65535)
        return process

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which runs the first stage and writes the records."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Return the device of this process: the GPU of its local rank, or the CPU.

        A process that sees exactly one GPU uses that one, because some clusters show each process a different GPU.
        :meth:`process_group` verifies that no two processes use the same GPU.

        Args:
            name: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.

        Raises:
            ConfigError: If the machine has too few GPUs. NCCL refuses two processes on one GPU.
        """
        import torch

        if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        gpus = torch.cuda.device_count()
        if gpus == 1:
            return torch.device("cuda", 0)
        got = f"{name} with {self.local_world} process(es) and {gpus} GPU(s) on this machine"
        require(gpus >= self.local_world, "trainer.device", "cpu, or a GPU for each process", got)
        return torch.device("cuda", self.local_rank)

    @contextmanager
    def process_group(self, device: torch.device, timeout: float, store: Store | None = None) -> Iterator[None]:
        """Bind the device and open the default process group for the duration of the context.

        Without torchrun's environment variables, only bind the device. :func:`set_variables` comes first.

        Args:
            device: Device of this process.
            timeout: Seconds after which a stalled communication fails.
            store: Store of these processes alone; None: that of torchrun, which may serve several groups.

        Raises:
            ConfigError: If two processes use the same GPU. Raised on every rank.
        """
        set_variables()
        import torch
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.elastic.utils.store import synchronize
        from torch.distributed.rendezvous import rendezvous

        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        if "WORLD_SIZE" not in os.environ:
            yield
            return
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError):  # no limit, which macOS refuses
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each of N ranks opens about 2 N sockets of gloo
        limit = timedelta(seconds=timeout)
        check_names(self.world == self.local_world, warns=self.local_rank == 0)
        if store is None:
            # torchrun keeps its store across restarts, and one process may open several groups in turn. Prefixes keep each group
            # from reading the keys of earlier ones.
            store = PrefixStore(f"group{next(_group_numbers)}", next(rendezvous("env://", timeout=limit))[0])
            store = PrefixStore(agree_on_start(store, self.rank, self.world, max(limit, START)), store)
        if on_gpu:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            require_distinct_gpus([gpu.decode() for gpu in synchronize(store, uuid.encode(), self.rank, self.world, "gpu")])
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=limit,
            device_id=device if on_gpu else None,
            store=store,
            rank=self.rank,
            world_size=self.world,
        )
        stopped = None
        try:
            yield
        except Interrupted as error:  # on every rank, after the last message
            stopped = error
            clear_frames(error.__traceback__)  # they refer to the pipeline
        gc.collect()  # of pipelines, whose groups of replicas must end before the default group
        dist.destroy_process_group()  # at exit, gloo's threads could abort the process
        if stopped is not None:
            raise stopped


def require_one_task() -> None:
    """Check that no launcher has started this process as one of several tasks, without torchrun's variables.

    In the script of a Slurm job and in a terminal of an allocation, SLURM_NTASKS is the number of tasks that srun would start. Only
    a step of several tasks is refused, which has SLURM_STEP_NUM_TASKS or a rank that is not 0.

    Raises:
        ConfigError: If it is one of several.
    """
    for name, (rank, *counts) in LAUNCHERS.items():
        place, count = (next((os.environ[key] for key in keys if key in os.environ), "") for keys in ([rank], counts))
        if not place.isdecimal() or (count.isdecimal() and int(count) < 2):
            continue
        if int(place) > 0 or (count.isdecimal() and (name != "Slurm" or counts[0] in os.environ)):
            how = "one task (petra train --nproc N starts N processes), one petra node on each machine, or RANK and WORLD_SIZE"
            tasks = f"{count or 'several'} tasks of {name}: each would be a run of its own in a folder that no other run uses"
            raise invalid(f"environment variable {rank}", f"{how} (docs/clusters.md; env -u {rank} for separate runs)", tasks)


def set_variables() -> None:
    """Set the variables of NCCL and torch that the environment lacks, and make the folder for dumps.

    Raises:
        ConfigError: If the folder can't be created.
    """
    os.environ.update({**NETWORK, **os.environ})
    if DUMPS in os.environ:
        os.environ[DUMPS] = str(path := user_path(f"environment variable {DUMPS}", os.environ[DUMPS]))
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise invalid(DUMPS, "a folder that can be created", f"{folder} ({error.strerror})") from error


def integer(name: str, value: str | None, least: int, most: int | None = None, note: str = "") -> int:
    """Return the integer that a text is.

    Args:
        note: What the message adds to what is expected.

    Raises:
        ConfigError: If it is none, or out of range.
    """
    expected = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    valid = value is not None and value.isdecimal() and least <= int(value) and (most is None or int(value) <= most)
    require(valid, name, expected + note, "nothing" if value is None else value)
    return int(value or 0)


def agree_on_start(store: Store, rank: int, world: int, limit: timedelta) -> str:
    """Return a name for this start of the run. It is the same on all ranks and differs from the name of any other start.

    torchrun keeps its store across restarts, so it also has keys of earlier starts. TORCHELASTIC_RESTART_COUNT is no such name: the
    agents of several machines count the restarts of their own processes, so the counts differ after a failure that not every agent
    has seen.

    Each rank announces a random name of its own. Rank 0 answers every name that it finds with its own name, also those of processes
    that have ended, until the process that announced the last name of each rank has acknowledged the answer.

    Args:
        store: Store that all ranks share.
        rank: Rank of this process.
        world: Number of processes.
        limit: Time to wait for the other ranks.

    Raises:
        torch.distributed.DistStoreError: If another rank does not start in time.
    """
    me = secrets.token_hex(8)
    if rank > 0:
        store.set(f"name_of_{rank}", me)
        store.wait([f"start_of_{me}"], limit)
        start = store.get(f"start_of_{me}").decode()
        store.set(f"{me}_in_{start}", "")
        return start
    if world == 1:
        return me
    keys = [f"name_of_{other}" for other in range(1, world)]
    deadline = time.monotonic() + limit.total_seconds()
    store.wait(keys, limit)
    answered: set[str] = set()
    while True:
        names = [store.get(key).decode() for key in keys]
        for name in set(names) - answered:
            store.set(f"start_of_{name}", me)
        answered |= {*names}
        acknowledged = [f"{name}_in_{me}" for name in names]
        if store.check(acknowledged):
            return me
        if time.monotonic() > deadline:
            store.wait(acknowledged, timedelta(milliseconds=1))  # raises
        time.sleep(POLL)


def require_distinct_gpus(gpus: Sequence[str]) -> None:
    """Check that all ranks use different GPUs, given by their unique identifiers. NCCL's own error names neither rank.

    Raises:
        ConfigError: If two ranks use the same one.
    """
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) < rank:
            raise invalid("trainer.device", "cpu, or a GPU for each process", f"GPU {gpu} on ranks {first} and {rank}")
