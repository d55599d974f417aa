"""Trains over the processes of this machine: ``python -m launch.local --processes 10 model=revnet18 ...``.

The configuration and its stage map are checked here, once; what can't work is one error, before any process has started.
"""

from __future__ import annotations

import argparse
import sys

import torch

from launch.config.compose import compose
from launch.config.schema import to_config
from launch.run.build import set_up
from launch.runtime.agent import run_agent
from launch.runtime.rank import Place


def main() -> None:
    """Checks, then runs torchrun's agent."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments are Hydra's; python -m launch.train --help lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many; one for each GPU if not given, or one without a GPU")
    options, overrides = parser.parse_known_args()
    processes = torch.cuda.device_count() or 1 if options.processes is None else options.processes
    if processes < 1:
        parser.error(f"--processes: found {processes}, accepted are integers >= 1")
    sys.argv[1:] = overrides
    first = Place(rank=0, world=processes, local_rank=0, local_world=processes)
    with first.reporting():
        configs = compose()
        for config in configs:
            set_up(to_config(config), first)
    if configs:
        run_agent(["--standalone", "--nproc-per-node", str(processes)], "launch.train", overrides)


if __name__ == "__main__":
    main()
