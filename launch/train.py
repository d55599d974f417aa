"""Train a model: ``petra train ...`` in one process, ``petra train --nproc N ...`` in N."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import own_module
from .cli import take_processes
from .runtime.terminal import command

if TYPE_CHECKING:
    from .config.schema import Config

TRAIN = own_module("launch.train")


@command
def main() -> None:
    """Run each configuration on the command line, which Hydra parses, or start the processes that do."""
    train_or_start(TRAIN, _configs)


def _configs() -> list[Config]:
    from .config.compose import command_line_configs

    return command_line_configs(required=True)


def train_or_start(module: str, read: Callable[[], list[Config]]) -> None:
    """Train in this process, or start the processes that do, if the command line has ``--nproc``.

    Modules are imported as late as possible: an invalid value is reported before torch is imported, and Ctrl-C works meanwhile.

    Args:
        module: Module that each process runs.
        read: Returns the configurations on the command line.

    Raises:
        PetraError: If a configuration is invalid.
    """
    processes, sys.argv[1:] = take_processes(sys.argv[1:])
    if processes is None:
        train(read)
    else:
        start_processes(processes, module, read)


def train(read: Callable[[], list[Config]]) -> None:
    """Train in this process, one of those that torchrun has started or the only one."""
    from .runtime.agent import this_process
    from .runtime.reporting import only_first_prints

    with this_process() as process:
        with only_first_prints(process):
            configs = read()
        if not configs:
            return
        import torch

        from .elastic.run import run

        torch.set_num_interop_threads(1)
        for config in configs:
            run(config, process)


def start_processes(processes: int, module: str, read: Callable[[], list[Config]]) -> None:
    """Check the configuration and the assignment of stages to processes once, then run torchrun's agent."""
    from .runtime.agent import run_on_this_machine, stop_before_start

    stop_before_start()
    from .runtime.rank import Process

    overrides = sys.argv[1:]
    configs = read()
    if not configs:
        return
    from .run.build import set_up

    first = Process(rank=0, world=processes, local_rank=0, local_world=processes)
    if all(config.dry_run for config in configs):  # which the first process does alone
        from .run.training import run

        for config in configs:
            run(config, first)
        return
    for config in configs:
        set_up(config, first)
    if configs[0].cluster.elastic:
        from .elastic.processes import run_replicas

        run_replicas(processes, configs[0].dp, module, overrides)
    run_on_this_machine(processes, module, overrides)


if __name__ == "__main__":
    main()
