"""Train in several processes on this machine: ``petra local --processes 10 model=revnet18 ...``.

The configuration and the assignment of stages to processes are checked once, before any process starts.
"""

from __future__ import annotations

import argparse
import sys

import torch

from petra.errors import invalid

from . import own_module
from .config.compose import compose_command_line
from .config.schema import to_config
from .run.build import set_up
from .runtime.agent import run_agent
from .runtime.rank import Process
from .runtime.reporting import report_errors


def main() -> None:
    """Check the configuration, then run torchrun's agent."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments are those of petra train; petra train --help lists them.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="number of processes (default: one for each GPU, or one without a GPU)"
    )
    options, overrides = parser.parse_known_args()
    processes = torch.cuda.device_count() or 1 if options.processes is None else options.processes
    if processes < 1:
        parser.error(str(invalid("--processes", "an integer >= 1", processes)))
    sys.argv[1:] = overrides
    first = Process(rank=0, world=processes, local_rank=0, local_world=processes)
    with report_errors(first):
        configs = compose_command_line()
        for config in configs:
            set_up(to_config(config), first)
    if configs:
        run_agent(["--standalone", "--nproc-per-node", str(processes)], own_module("launch.train"), overrides)


if __name__ == "__main__":
    main()
