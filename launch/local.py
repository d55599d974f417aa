"""Train in several processes on this machine: ``petra local --processes 10 model=revnet18 ...``.

The configuration and the assignment of stages to processes are checked once, before any process starts.
"""

from __future__ import annotations

import sys

from petra.errors import invalid

from . import own_module
from .runtime.agent import run_agent
from .runtime.rank import Process
from .runtime.signals import stop_before_start
from .runtime.terminal import command, parser_for


@command
def main() -> None:
    """Check the configuration, then run torchrun's agent."""
    stop_before_start()
    from .config.compose import training_configs

    parser = parser_for(__doc__, "All other arguments are those of petra train; petra train --help lists them.")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes (default: one for each GPU, or one without a GPU)"
    )
    options, overrides = parser.parse_known_args()
    if options.processes is not None and options.processes < 1:
        parser.error(str(invalid("--processes", "an integer >= 1", options.processes)))
    sys.argv[1:] = overrides
    configs = training_configs()
    if not configs:
        return
    import torch

    from .run.build import set_up

    processes = options.processes or torch.cuda.device_count() or 1
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

        run_replicas(processes, configs[0].dp, own_module("launch.train"), overrides)
    run_agent(["--standalone", "--nproc-per-node", str(processes)], own_module("launch.train"), overrides)


if __name__ == "__main__":
    main()
