"""Makes a table or a figure of the papers again: ``python -m launch.reproduce table4 scale=cpu data.root=DIR``.

    scale=paper  as published; what trains needs GPUs and days
    scale=cpu    (default) a smaller version for two cores, which the result states
    key=value    any key of the configuration, for all runs of a target that trains

--out gets TARGET.md beside the paper's figures, TARGET.json with the raw data, TARGET.png, and in runs/ the runs, which other
targets use too. The same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from launch.reproduce.report import Report, Request, Scale
from launch.reproduce.targets import TARGETS
from petra.analysis.plots import panels
from petra.errors import ConfigError, PetraError
from petra.training import write_json


def main(arguments: list[str] | None = None) -> None:
    """Makes one target, and prints its text; ends with status 1 if that can't be done."""
    names = "\n".join(f"    {name:<14} {target.title}" for name, target in TARGETS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"targets:\n{names}",
        allow_abbrev=False,
    )
    parser.add_argument("target", choices=TARGETS, metavar="TARGET", help="see below")
    parser.add_argument("--out", type=Path, default=Path("runs", "reproduce"), help="folder of the results (runs/reproduce)")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="FOLDER", help="take finished runs from here too")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of each run on this machine (1)")
    parser.add_argument("--gather", action="store_true", help="train nothing, show what there is")
    options, words = parser.parse_known_args(arguments)
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
    """Scale and overrides.

    Raises:
        ConfigError: a word that is neither.
    """
    for word in words:
        if "=" not in word or word.startswith("-"):
            raise ConfigError(f"command line: found {word}, accepted are scale=paper, scale=cpu and key=value")
    scales = [word.removeprefix("scale=") for word in words if word.startswith("scale=")]
    if scales and scales[-1] not in [*Scale]:
        raise ConfigError(f"scale: found {scales[-1]}, accepted are {', '.join(Scale)}")
    overrides = tuple(word for word in words if not word.startswith("scale="))
    if overrides and not trains:
        raise ConfigError(f"{overrides[0].partition('=')[0]}: found with {target}, which trains nothing; accepted is scale")
    return Scale(scales[-1]) if scales else Scale.CPU, overrides


def write(request: Request, name: str, title: str, report: Report) -> None:
    """Leaves the result in the request's folder and prints its text."""
    text = f"# {title}\n\n`scale={request.scale}`{''.join(f' `{word}`' for word in request.overrides)}\n\n{report.text}"
    request.out.mkdir(parents=True, exist_ok=True)
    if report.panels:
        panels(report.panels, request.out / f"{name}.png", columns=report.columns, shaded=report.shaded)
        text += f"\n![{title}]({name}.png)\n"
    (request.out / f"{name}.md").write_text(text, encoding="utf-8")
    content = {"target": name, "scale": request.scale, "overrides": list(request.overrides), "torch": torch.__version__}
    write_json(request.out / f"{name}.json", content | {"data": report.data})
    print(text, end="")
