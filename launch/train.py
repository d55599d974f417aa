"""Train a model: ``petra train ...`` in one process, ``petra train --nproc N ...`` in N."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from .cli import take_processes
from .config.compose import Job, command_line_jobs
from .runtime import agent
from .runtime.rank import Process, require_one_task
from .runtime.reporting import only_first_prints
from .runtime.terminal import command


@command
def main() -> None:
    """Run each configuration on the command line, which Hydra parses, or start the processes that do."""
    train_or_start("train", lambda: command_line_jobs(required=True))


def train_or_start(name: str, read: Callable[[], list[Job]]) -> None:
    """Train in this process, or check the configurations and start the processes that train if the command line has ``--nproc``.

    Torch is imported as late as possible: an invalid value is reported before, and Ctrl-C works meanwhile.

    Args:
        name: Name of the command that each process runs.
        read: Returns the configurations on the command line.

    Raises:
        PetraError: If a configuration is invalid, or a model can't be divided among the processes.
    """
    processes, sys.argv[1:] = take_processes(sys.argv[1:])
    if processes is None:
        with agent.this_process() as process:
            with only_first_prints(process):
                jobs = read()
            if jobs:
                import torch

                torch.set_num_interop_threads(1)
                train(jobs, process)
        return
    agent.stop_before_start()
    require_one_task()
    overrides, jobs, first = sys.argv[1:], read(), Process(0, processes, 0, processes)
    if all(job.config.dry_run for job in jobs):  # which the first process does alone
        train(jobs, first)
        return
    from .run.build import set_up

    for job in jobs:
        set_up(job.config, first)
    if jobs[0].config.cluster.elastic:
        from .elastic.processes import run_replicas

        run_replicas(processes, jobs[0].config.dp, name, overrides)
    agent.run_agent([*agent.ONE_MACHINE, "--nproc-per-node", str(processes)], name, overrides)


def train(jobs: Sequence[Job], process: Process) -> None:
    """Train each configuration in this process of its run, then print a table of the runs of a sweep."""
    folders = []
    for job in jobs:
        if job.config.cluster.elastic and not job.config.dry_run:
            from .elastic import run as elastic

            elastic.run(job.config, process)
        else:
            from .run.training import run

            folders.append(run(job.config, process, job.swept))
    if len(found := [folder for folder in folders if folder is not None]) > 1:
        from .compare import comparison

        print(comparison(found), end="", flush=True)


if __name__ == "__main__":
    main()
