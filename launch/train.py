"""Train a model: ``petra train ...`` in one process, ``petra train --nproc N ...`` in N."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from .cli import take_processes
from .config.compose import command_line_configs
from .config.schema import Config
from .runtime import agent
from .runtime.rank import Process
from .runtime.reporting import only_first_prints
from .runtime.terminal import command


@command
def main() -> None:
    """Run each configuration on the command line, which Hydra parses, or start the processes that do."""
    train_or_start("train", lambda: command_line_configs(required=True))


def train_or_start(name: str, read: Callable[[], list[Config]]) -> None:
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
                configs = read()
            if configs:
                import torch

                torch.set_num_interop_threads(1)
                train(configs, process)
        return
    agent.stop_before_start()
    overrides, configs, first = sys.argv[1:], read(), Process(0, processes, 0, processes)
    if all(config.dry_run for config in configs):  # which the first process does alone
        train(configs, first)
        return
    from .run.build import set_up

    for config in configs:
        set_up(config, first)
    if configs[0].cluster.elastic:
        from .elastic.processes import run_replicas

        run_replicas(processes, configs[0].dp, name, overrides)
    agent.run_agent([*agent.ONE_MACHINE, "--nproc-per-node", str(processes)], name, overrides)


def train(configs: Sequence[Config], process: Process) -> None:
    """Train each configuration in this process of its run."""
    for config in configs:
        if config.cluster.elastic and not config.dry_run:
            from .elastic.run import run
        else:
            from .run.training import run
        run(config, process)


if __name__ == "__main__":
    main()
