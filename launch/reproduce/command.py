"""Reproduce a table or a figure of the papers: ``petra reproduce table4 scale=cpu data.root=DIR``.

    scale=paper  as published; targets that train need GPUs and days
    scale=cpu    a smaller version for two CPU cores (default); the result states what is smaller
    key=value    any key of the configuration, for all runs of a target that trains

The folder --out receives TARGET.md with our figures beside the paper's, TARGET.json with the raw data, TARGET.png, and in runs/ the
trained runs. Targets share runs. Run the same command again to continue an interrupted reproduction.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from petra.analysis.plots import panels
from petra.errors import PetraError, invalid, require
from petra.training import write_json

from .report import Report, Request, Scale
from .targets import TARGETS


def main(arguments: list[str] | None = None) -> None:
    """Make one target and print its text. Exit with status 2 if that is impossible."""
    options, words = _parser().parse_known_args(arguments)
    target = TARGETS[options.target]
    try:
        scale, overrides = parse(words, target.trains, options.target)
        torch.set_num_threads(1)
        request = Request(scale, options.out, overrides, tuple(options.runs), options.processes, options.gather)
        write(request, options.target, target.title, target.make(request))
    except PetraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def parse(words: list[str], trains: bool, target: str) -> tuple[Scale, tuple[str, ...]]:
    """Return the scale and the overrides.

    Args:
        trains: Whether the target trains networks.
        target: Name of the target.

    Raises:
        ConfigError: If a word is neither a scale nor an override, or if a target that trains nothing gets an override.
    """
    for word in words:
        require("=" in word and not word.startswith("-"), "command line", "scale=paper, scale=cpu or key=value", word)
    scales = [word.removeprefix("scale=") for word in words if word.startswith("scale=")]
    if scales:
        require(scales[-1] in [*Scale], "scale", f"one of {', '.join(Scale)}", scales[-1])
    overrides = tuple(word for word in words if not word.startswith("scale="))
    if overrides and not trains:
        raise invalid("command line", f"only scale=... with {target}, which trains nothing", overrides[0])
    return Scale(scales[-1]) if scales else Scale.CPU, overrides


def write(request: Request, name: str, title: str, report: Report) -> None:
    """Write the result to the request's folder and print its text."""
    text = f"# {title}\n\n`scale={request.scale}`{''.join(f' `{word}`' for word in request.overrides)}\n\n{report.text}"
    request.out.mkdir(parents=True, exist_ok=True)
    if report.panels:
        panels(report.panels, request.out / f"{name}.png", columns=report.columns, shaded=report.shaded)
        text += f"\n![{title}]({name}.png)\n"
    (request.out / f"{name}.md").write_text(text, encoding="utf-8")
    content = {"target": name, "scale": request.scale, "overrides": list(request.overrides), "torch": torch.__version__}
    write_json(request.out / f"{name}.json", content | {"data": report.data})
    print(text, end="")


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"    {name:<14} {target.title}" for name, target in TARGETS.items())
    parser = argparse.ArgumentParser(
        prog="petra reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"targets:\n{names}",
        allow_abbrev=False,
    )
    parser.add_argument("target", choices=TARGETS, metavar="TARGET", help="one of the targets listed below")
    parser.add_argument(
        "--out", type=Path, default=Path("runs", "reproduce"), help="folder of the results (default: runs/reproduce)"
    )
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], metavar="FOLDER", help="further folders with finished runs to use"
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each run on this machine (default: 1)")
    parser.add_argument("--gather", action="store_true", help="train nothing, use only finished runs")
    return parser
