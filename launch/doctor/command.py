"""Check the machines of a run: report versions, devices, the speed of links between processes, and problems.

``petra doctor`` checks one process, ``petra doctor --nproc 4 trainer.device=cpu`` four processes on this machine, and
``petra node --module launch.doctor`` the processes of several nodes. With ``cluster.machines=FILE``, it also measures the speed of
each device and writes the file that auto-tuning reads.

Arguments are keys of the configuration, as of ``petra train``: above all dp, trainer.device and cluster.machines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import first_line, invalid
from petra.plan.layout import processes_per_replica

from ..config.compose import command_line_configs
from ..config.machines import require_writable, write_machines
from ..config.schema import Config
from ..run.build import set_numerics
from ..runtime.agent import this_process
from ..runtime.machine import INTERFACES
from ..runtime.rank import Process
from ..runtime.reporting import only_first_prints
from ..runtime.terminal import command, parser_for, table
from .links import LARGE_MESSAGE, Links, describe, measure_links, measure_speeds, slow_links
from .machine import NO_GPU, Report, find_differences, inspect_machine


@command
def main() -> None:
    """Print the findings of all processes on rank 0."""
    with this_process() as process:
        if process.first:
            parser_for(__doc__).parse_known_args()  # --help
        with only_first_prints(process):
            configs = command_line_configs()
        for config in configs:
            examine(config, process)


def examine(config: Config, process: Process) -> None:
    """Join the process group as a run would, inspect every machine, and measure the links.

    Raises:
        PetraError: If the processes can't communicate, or the file of machines can't be written.
    """
    device = process.device(config.trainer.device)
    replica_size = processes_per_replica(process.world, config.dp)
    try:
        with process.process_group(device, config.trainer.timeout):
            with raise_on_all_ranks():
                if process.first and config.cluster.machines is not None:
                    require_writable(config.cluster.machines)
            set_numerics(config.trainer)
            reports = all_gather_objects(inspect_machine(process, device, requested=config.trainer.device))
            links = measure_links(device, config.dp) if process.world > 1 else {}
            speeds = [] if config.cluster.machines is None else measure_speeds(device)
    except RuntimeError as error:  # the base class of torch.distributed's errors
        got = f"{os.environ.get(INTERFACES, 'none')} ({first_line(error)})"
        raise invalid(INTERFACES, "network interfaces over which the processes reach each other", got) from error
    if process.first:
        print(report_text(reports, links, find_differences(reports, replica_size)), flush=True)
        if config.cluster.machines is not None:
            write_machines(config.cluster.machines, describe(reports, links, speeds, replica_size))
            print(f"speed, memory and links of the processes of a pipeline: {config.cluster.machines}", flush=True)


def report_text(reports: Sequence[Report], links: Links, problems: Sequence[str]) -> str:
    """Return the whole report in Markdown."""
    first, problems = reports[0], [*problems, *slow_links(reports, links)]
    machines = [(str(r.rank), r.node, r.device, f"{r.memory / 2**30:.1f}", str(r.cores)) for r in reports]
    missing = next((problem for r in reports for problem in r.problems if problem.startswith(NO_GPU)), "")
    text = f"{missing}\n\n" * bool(missing) + f"{', '.join(f'{name} {value}' for name, value in first.versions.items())}\n\n"
    text += f"{table(('rank', 'node', 'device', 'memory of GPU or node (GiB)', 'cores to use'), machines)}\n"
    text += "".join(f"{name}={value}\n" for name, value in first.environment.items()) + "\n"
    if links:
        size = f"{LARGE_MESSAGE // 2**20} MiB forward (ms)"
        rows = [
            (
                *(f"{rank} – {other}", f"{pair.forward.latency * 1e6:.0f}"),
                *(f"{link.bandwidth / 1e9:.2f}" for link in (pair.forward, pair.backward)),
                f"{LARGE_MESSAGE / pair.forward.bandwidth * 1e3:.1f}",
            )
            for (rank, other), pair in links.items()
        ]
        text += f"{table(('ranks', 'latency (µs)', 'forward (GB/s)', 'backward (GB/s)', size), rows)}\n"
    return text + "\n".join(["Problems:", *(f"- {item}" for item in problems)] if problems else ["No problems found."])
