"""Print the reference page of all keys, from the schema and the comments under conf/.

``petra reference > docs/configuration.md``
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from .config import CONF
from .config.checks import schema_keys
from .config.presets import purposes
from .config.schema import Config

HEAD = """# Configuration

This page is generated from `launch/config/schema.py` and `conf/` by `petra reference > docs/configuration.md`.

`GROUP=FILE` selects a file of a group, and `GROUP.KEY=VALUE` sets a key. Later arguments override earlier ones. In each table of
files, the first one is the default. If a key differs between files, its value and meaning are followed by the files' names in
parentheses: `2 (petra, dsp)`. Unknown keys, wrong types and invalid values are errors before anything runs.
A resumed run may change keys marked *same results*: they don't change what is computed, apart from rounding and the run's length.
[Experiments](experiments.md) configure whole runs.
"""
NAME = "name"
LINE = re.compile(r"^(\w+): (.*?) # (.*)$")
"""A top-level key, its value, its comment."""


def main() -> None:
    """Print the page."""
    print(page(), end="")


def page() -> str:
    """Return the page in Markdown."""
    root = Path(CONF) / "config.yaml"
    groups = [entry for entry in OmegaConf.load(root).defaults if OmegaConf.is_dict(entry)]
    chosen = {group: name for entry in groups for group, name in entry.items()}
    parts = [HEAD, "## Top level\n", "".join(_table(Config, {"config": root}, ""))]
    for group in get_type_hints(Config):
        if not is_dataclass(schema := get_type_hints(Config)[group]):
            continue
        paths = sorted(Path(CONF, group).glob("*.yaml"), key=lambda path: (path.stem != chosen[group], path.stem))
        files = {path.stem: path for path in paths}
        names = sorted(purposes(group), key=lambda name: (name != chosen[group], name))
        parts += [f"## {group}\n", *_files(group, names), "".join(_table(schema, files, f"{group}."))]
    parts += ["## experiment\n\nNone by default.\n", *_files("experiment", list(purposes("experiment")))]
    return "\n".join(parts)


def _files(group: str, names: list[str]) -> Iterator[str]:
    """Yield a table of the configurations of a group with their purpose."""
    if len(names) > 1:
        about = purposes(group)
        yield "".join(["| file | |\n|---|---|\n", *(f"| `{group}={name}` | {_cell(about[name])} |\n" for name in names)])


def _table(schema: Any, files: dict[str, Path], prefix: str) -> Iterator[str]:
    """Yield a row for each key in the order of the schema: type, values and comments in the files."""
    settings = {name: {key: (value, comment) for key, value, comment in _settings(path)} for name, path in files.items()}
    yield "| key | type | value | meaning |\n|---|---|---|---|\n"
    keys = schema_keys(Config)
    for key, kind in get_type_hints(schema).items():
        if is_dataclass(kind) or (key == NAME and len(files) > 1):
            continue
        known = {name: keys[key] for name, keys in settings.items() if key in keys}
        text = (
            (kind.__name__ if isinstance(kind, type) else str(kind))
            .replace(" | None", ", null")
            .replace("typing.Any", "see meaning")
        )
        values, meanings = (_summed({name: pair[i] for name, pair in known.items()}, list(files)) for i in (0, 1))
        mark = " (same results)" if keys[prefix + key].same_results else ""
        yield f"| `{prefix}{key}` | {_cell(text)} | {_cell(values)} | {_cell(meanings)}{mark} |\n"


def _settings(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each top-level key of a file, with its value as written and its comment."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := LINE.match(line):
            yield match[1], match[2], match[3]


def _summed(texts: dict[str, str], files: list[str]) -> str:
    """Join the different texts, each with the names of its files, the default file's first. Omit names that all files share."""
    by_text: dict[str, list[str]] = {}
    for name, text in texts.items():
        by_text.setdefault(text, []).append(name)
    return "; ".join(text + _names(names, files) for text, names in by_text.items())


def _names(names: list[str], files: list[str]) -> str:
    others = [name for name in files if name not in names]
    if not others:
        return ""
    return f" (all but {', '.join(others)})" if len(others) < len(names) else f" ({', '.join(names)})"


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("_<", r"\_<").replace("<", "&lt;")  # a bare _ next to < would begin emphasis


if __name__ == "__main__":
    main()
