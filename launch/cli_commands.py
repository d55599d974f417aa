"""Names and files of the commands beside this module."""

from __future__ import annotations

from pathlib import Path

IN_SEVERAL_PROCESSES = ("train", "resume", "evaluate", "doctor")
"""Commands that accept ``--nproc``."""


def commands() -> list[str]:
    """Return the names of all commands: the modules beside this one, and the packages with a module ``command``."""
    folder = Path(__file__).parent
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__" and not path.stem.startswith("cli")]
    return sorted([*modules, *(path.parent.name for path in folder.glob("*/command.py"))])


def source(name: str) -> Path:
    """Return the file of a command."""
    folder = Path(__file__).parent
    return path if (path := folder / name / "command.py").exists() else folder / f"{name}.py"
