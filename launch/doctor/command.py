"""Looks at where a run would run: versions, devices, links between neighbouring processes and replicas, and what is wrong.

Alone, or in the place of launch.train with the overrides of the run: ``python -m launch.doctor``,
``torchrun --nproc-per-node 4 -m launch.doctor cluster.interfaces=[eth0]``, ``python -m launch.node --module launch.doctor``.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.config.compose import compose
from launch.config.schema import Config, to_config
from launch.doctor.links import LARGE, Link, measure_links
from launch.doctor.machine import Report, compare, look
from launch.runtime.network import apply
from launch.runtime.rank import Place
from petra.distributed import gathered
from petra.errors import ConfigError, first_line
from petra.plan.layout import processes_per_replica


def main() -> None:
    """Prints in the first process what all of them found."""
    place = Place.from_environment()
    with place.reporting():
        with place.composing():
            configs = compose()
        for config in configs:
            examine(to_config(config), place)


def examine(config: Config, place: Place) -> None:
    """Joins the processes as a run would, and reports.

    Raises:
        ConfigError: they can't be joined.
    """
    device = place.device(config.trainer.device)
    line = processes_per_replica(place.world, config.dp)
    notes = apply(config.cluster)
    try:
        with place.joined(device, config.trainer.timeout):
            reports = gathered(look(place, device, config.trainer.threads, config.cluster.interfaces))
            links = measure_links(device, config.dp) if place.world > 1 else []
    except RuntimeError as error:  # of which torch.distributed's errors are kinds
        reason = first_line(error)
        raise ConfigError(
            f"cluster.interfaces: found {config.cluster.interfaces}, with which the processes can't talk to each other ({reason})"
        ) from error
    if place.first:
        print(text(reports, links, [*notes, *compare(reports, line)]), flush=True)


def text(reports: Sequence[Report], links: Sequence[Link], wrong: Sequence[str]) -> str:
    """The whole report, in Markdown."""
    first = reports[0]
    lines = [
        ", ".join(f"{name} {value}" for name, value in first.versions.items()),
        "",
        "| rank | node | device | memory (GiB) | cores |",
        "|---|---|---|---|---|",
        *(f"| {r.rank} | {r.node} | {r.device} | {r.memory / 2**30:.1f} | {r.cores} |" for r in reports),
        "",
        *(f"{name}={value}" for name, value in first.environment.items()),
        "",
    ]
    if links:
        size = LARGE // 2**20
        lines += [
            f"| ranks | latency (µs) | forward (GB/s) | backward (GB/s) | {size} MiB forward (ms) |",
            "|---|---|---|---|---|",
            *(
                f"| {link.rank} – {link.rank + link.step} | {link.latency * 1e6:.0f} | {link.forward / 1e9:.2f} "
                f"| {link.backward / 1e9:.2f} | {LARGE / link.forward * 1e3:.1f} |"
                for link in links
            ),
            "",
        ]
    return "\n".join([*lines, "Wrong:", *(f"- {item}" for item in wrong)] if wrong else [*lines, "Nothing wrong found."])
