"""The command line ``petra COMMAND ...``. Imports torch only for a command that needs it."""

from __future__ import annotations

import ast
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from petra.errors import invalid, require

from . import own_module
from .cli_commands import IN_SEVERAL_PROCESSES, commands, source
from .runtime.rank import integer
from .runtime.terminal import command

USAGE = """Train deep networks split over several processes with PETRA, and examine the runs.

Usage: petra COMMAND ...        petra COMMAND --help describes a command

{commands}

petra --version                 print the version
petra train --nproc N ...       train in N processes on this machine, or in one per GPU (--nproc auto); resume, evaluate, doctor too
petra completion bash           print a script that completes words with TAB in bash; zsh for that shell
"""


@command
def main() -> None:
    """Run the command that the command line names."""
    run(sys.argv[1:])


def run(words: list[str]) -> None:
    """Run ``petra`` with the given arguments.

    Raises:
        PetraError: If there is no such command, or the number of processes is invalid.
    """
    name, *rest = words or ["--help"]
    require(name != "reproduce", "command", "python -m reproduction in a clone of the project", name)
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(f"petra {installed_version()}")
    elif name == "completion":
        from .cli_completion import main as complete

        complete(rest)
    else:
        require_command(name)
        processes, others = (None, rest) if name in ("train", "resume") else take_processes(rest)
        if processes is None:
            start(name, others)
        else:
            require(name in IN_SEVERAL_PROCESSES, "--nproc", f"one of the commands {', '.join(IN_SEVERAL_PROCESSES)}", name)
            from .runtime.agent import run_on_this_machine

            run_on_this_machine(processes, own_module(f"launch.{name}"), others)


def start(name: str, rest: list[str]) -> None:
    """Call ``main()`` of a command with ``rest`` as its command line."""
    sys.argv = [f"petra {name}", *rest]
    module = own_module(f"launch.{name}")
    import_module(f"{module}.command" if source(name).stem == "command" else module).main()


def usage() -> str:
    """Return the text of ``petra --help``, with the first sentence about each command."""
    lines = []
    for name in commands():
        text = ast.get_docstring(ast.parse(source(name).read_text(encoding="utf-8"))) or ""
        sentence = text.splitlines()[0].partition(": ")[0].partition(". ")[0].rstrip(".:")
        lines.append(f"  petra {name:<12} {sentence[:1].lower()}{sentence[1:]}")
    return USAGE.format(commands="\n".join(lines)).rstrip()


def installed_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("petra")
    except PackageNotFoundError:
        return "(not installed)"


def require_command(name: str) -> None:
    """Check that a command exists.

    Raises:
        ConfigError: If it doesn't.
    """
    if name not in (known := commands()):
        near = get_close_matches(name, known, 1, 0.6)
        raise invalid("command", f"{near[0]} or another name from petra --help" if near else "a name from petra --help", name)


def take_processes(words: list[str]) -> tuple[int | None, list[str]]:
    """Return the value of ``--nproc``, if it is among the words, and the other words. ``auto`` is the number of GPUs, at least 1.

    Raises:
        ConfigError: If the value is something else than an integer >= 1.
    """
    for i, word in enumerate(words):
        if word == "--nproc" or word.startswith("--nproc="):
            following = words[i + 1 : i + 2] if word == "--nproc" else [word.partition("=")[2]]
            value = following[0] if following else "nothing"
            if value == "auto":
                import torch

                value = str(torch.cuda.device_count() or 1)
            return integer("--nproc", value, 1, note=", or auto"), words[:i] + words[i + 1 + (word == "--nproc") :]
    return None, words


if __name__ == "__main__":
    main()
