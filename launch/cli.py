"""The command line ``petra COMMAND ...``. Imports torch only for a command that needs it."""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import distributions
from io import StringIO
from pathlib import Path

from petra.errors import accepted, invalid, require

from .runtime.rank import integer, require_one_task
from .runtime.terminal import command

IN_SEVERAL_PROCESSES = ("train", "resume", "evaluate", "doctor")
"""Commands that accept ``--nproc``."""
CONFIGURED = ("train", "resume", "node", "plan", "doctor", "evaluate", "generate", "export", "predict")
"""Commands that accept keys of the configuration, which Hydra completes."""
USAGE = """Train deep networks split over several processes with PETRA, and examine the runs.

Usage: petra COMMAND ...        petra COMMAND --help describes a command

{commands}

petra --version                 print the version
petra train --nproc N ...       train in N processes on this machine, or in one per GPU (--nproc auto); resume, evaluate, doctor too
petra -sc install=bash          print Hydra's script that completes commands, groups, files and keys with TAB in bash
"""


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the first argument names, with the others as its command line."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print("petra", next((found.version for found in distributions(name="petra")), "(not installed)"))
    elif name == "-sc":
        complete(rest)
    elif name not in (known := commands()):
        near = get_close_matches(name, known, 1, 0.6)
        raise invalid("command", f"{near[0]} or another name from petra --help" if near else "a name from petra --help", name)
    else:
        processes, others = (None, rest) if name in ("train", "resume") else take_processes(rest)
        if processes is None:
            start(name, f"petra {name}", others)
        else:
            require_one_task()
            require(name in IN_SEVERAL_PROCESSES, "--nproc", f"one of the commands {', '.join(IN_SEVERAL_PROCESSES)}", name)
            from .runtime.agent import ONE_MACHINE, run_agent

            run_agent([*ONE_MACHINE, "--nproc-per-node", str(processes)], name, others)


def commands() -> dict[str, Path]:
    """Return the files of all commands by name: the modules beside this one, and ``command.py`` of the packages that have it."""
    modules = {path.stem: path for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "cli")}
    return dict(sorted([*modules.items(), *((path.parent.name, path) for path in Path(__file__).parent.glob("*/command.py"))]))


def start(name: str, program: str, rest: list[str]) -> None:
    """Call ``main()`` of a command with ``program`` and ``rest`` as its command line."""
    sys.argv = [program, *rest]
    module = f".{name}.command" if commands()[name].stem == "command" else f".{name}"
    import_module(module, __package__).main()


def complete(words: list[str]) -> None:
    """Do what Hydra's script for bash asks: ``install=bash`` prints it, ``query=bash`` completes the line in ``COMP_LINE``.

    Hydra, which knows neither commands and flags nor keys with defaults in signatures nor names that a key accepts, gets the
    arguments ``key=value`` and the last word. Errors in the arguments are not printed: they would appear in the line.
    """
    *before, last = os.environ.get("COMP_LINE", "").split(" ")
    if words != ["query=bash"]:
        start("train", "petra", ["-sc", *words])
    elif len(before) < 2:
        print(*(name for name in commands() if name.startswith(last)))
    elif last.startswith("-") and before[1] in commands():
        with redirect_stdout(StringIO()) as text, suppress(SystemExit):
            start(before[1], f"petra {before[1]}", ["--help"])
        print(*sorted(flag for flag in {*re.findall("--[a-z-]+", text.getvalue())} if flag.startswith(last)))
    elif before[1] in CONFIGURED:
        from .config.catalogue import all_keys, configurations

        known, (name, equals, value) = all_keys(), last.partition("=")
        names = accepted(known[name].hint) if name in known else configurations(name) if name.isidentifier() else ()
        print(*(f"{name}={each}" for each in names if equals and " " not in each and each.startswith(value)))
        print(*(f"{key}=" for key in known if "." in last and key.startswith(last)))
        os.environ["COMP_LINE"] = " ".join(["petra", *(word for word in before if "=" in word and word[0] != "-"), last])
        with redirect_stderr(StringIO()):
            start("train", "petra", ["-sc", *words])


def usage() -> str:
    """Return the text of ``petra --help``, with the first sentence about each command."""
    lines = []
    for name, path in commands().items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = text.splitlines()[0].partition(": ")[0].partition(". ")[0].rstrip(".:")
        lines.append(f"  petra {name:<12} {sentence[:1].lower()}{sentence[1:]}")
    return USAGE.format(commands="\n".join(lines)).rstrip()


def take_processes(words: list[str]) -> tuple[int | None, list[str]]:
    """Return the value of ``--nproc``, if it is among the words, and the other words. ``auto`` is the number of GPUs, at least 1.

    Raises:
        ConfigError: If the value is something else than an integer >= 1.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", nargs="?", const="nothing")
    options, others = parser.parse_known_args(words)
    if (value := options.nproc) == "auto":
        import torch

        value = str(torch.cuda.device_count() or 1)
    return None if value is None else integer("--nproc", value, 1, note=", or auto"), others
