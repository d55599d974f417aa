"""Reproduce a table or a figure of the papers: ``python -m reproduction table4 scale=cpu data.root=DIR``.

The target ``all`` makes all of them. With --page, the text is also written into a Markdown page.

    scale=paper  as published; targets that train need GPUs and days
    scale=cpu    a smaller version for two CPU cores (default); the result states what is smaller
    key=value    any key of the configuration, for all runs of a target that trains

The folder --out receives TARGET.md with our figures beside the paper's, TARGET.json with the raw data, TARGET.png, and in runs/ the
trained runs. Targets share runs. Run the same command again to continue an interrupted reproduction.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from launch.runtime.terminal import command
from petra.analysis.plots import grid, save
from petra.errors import PetraError, invalid, require
from petra.training import write_json

from .report import Report, Request, Scale
from .targets import TARGETS

ALL = "all"
BEGIN, END = "<!-- begin reproduction -->", "<!-- end reproduction -->"
"""Marks of the part of a page that ``--page`` writes."""


@command
def main(arguments: list[str] | None = None) -> None:
    """Make one target and print its text."""
    options, words = _parser().parse_known_args(arguments)
    trains = options.target == ALL or TARGETS[options.target].trains
    scale, overrides = parse(words, trains, options.target)
    require(options.processes >= 1, "--processes", "an integer >= 1", options.processes)
    for folder in options.runs:
        exists = folder.is_dir() or (folder.suffix == ".jsonl" and folder.is_file())
        require(exists, "--runs", "existing folders, or files of records (key=value goes before --runs)", folder)
    if options.page is not None:
        _around_marks(options.page)
    torch.set_num_threads(1)
    request = Request(scale, options.out, overrides, tuple(options.runs), options.processes, options.gather)
    if options.target == ALL:
        texts = make_all(request)
    else:
        target = TARGETS[options.target]
        texts = [write(request, options.target, target.title, target.make(request))]
        print(texts[0], end="")
    if options.page is not None:
        write_page(options.page, texts)


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


def make_all(request: Request) -> list[str]:
    """Make and print all targets, and return their texts.

    A target that can't be made, because runs are missing, gets a line with the reason.
    """
    texts = []
    for name, target in TARGETS.items():
        own = request if target.trains else replace(request, overrides=())
        try:
            texts.append(write(own, name, target.title, target.make(own)))
        except PetraError as error:
            texts.append(f"# {target.title}\n\nNot run: {error}\n")
        print(texts[-1])
    return texts


def write_page(page: Path, texts: Sequence[str]) -> None:
    """Write the texts of targets between the marks of a page. Sections of other targets stay as they are.

    Raises:
        ConfigError: If the page has no marks.
    """
    before, old, after = _around_marks(page)
    sections = {section.splitlines()[0]: section for section in re.split("^(?=### )", old, flags=re.MULTILINE)[1:]}
    for text in texts:
        section = re.sub(r"^!\[.*\n?", "", text, flags=re.MULTILINE).replace("# ", "### ", 1)
        sections[section.splitlines()[0]] = section
    content = "\n\n".join(section.strip("\n") for section in sections.values())
    page.write_text(f"{before}{BEGIN}\n\n{content}\n\n{END}{after}", encoding="utf-8")


def _around_marks(page: Path) -> tuple[str, str, str]:
    """Return the text before, between and after the marks of a page."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    parts = re.split(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", text, maxsplit=1, flags=re.DOTALL)
    require(len(parts) == 3, "--page", f"a file with the lines {BEGIN} and {END}", f"{page} without them")
    return parts[0], parts[1], parts[2]


def write(request: Request, name: str, title: str, report: Report) -> str:
    """Write the result to the request's folder and return its text."""
    text = f"# {title}\n\n`scale={request.scale}`{''.join(f' `{word}`' for word in request.overrides)}\n\n{report.text}"
    request.out.mkdir(parents=True, exist_ok=True)
    if report.panels:
        save(grid(report.panels, columns=report.columns, shaded=report.shaded), request.out / f"{name}.png")
        text += f"\n![{title}]({name}.png)\n"
    (request.out / f"{name}.md").write_text(text, encoding="utf-8")
    content = {"target": name, "scale": request.scale, "overrides": list(request.overrides), "torch": torch.__version__}
    write_json(request.out / f"{name}.json", content | {"data": report.data})
    return text


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"    {name:<17} {target.title}" for name, target in TARGETS.items())
    parser = argparse.ArgumentParser(
        prog="python -m reproduction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"targets:\n{names}",
        allow_abbrev=False,
    )
    parser.add_argument("target", choices=(*TARGETS, ALL), metavar="TARGET", help="one of the targets listed below")
    parser.add_argument(
        "--out", type=Path, default=Path("runs", "reproduce"), help="folder of the results (default: runs/reproduce)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="further folders with finished runs to use, or files of records",
    )
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each run on this machine (default: 1)")
    parser.add_argument("--gather", action="store_true", help="train nothing, use only finished runs")
    parser.add_argument("--page", type=Path, metavar="FILE", help="page to write the text to, between its marks")
    return parser
