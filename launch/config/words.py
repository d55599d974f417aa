"""Words of the command line: overrides ``key=value``, of which texts and paths are what was typed; flags and keys of Hydra.

Hydra reads ``run_dir=2026_11_22`` as a number, and refuses a value with ``~``, ``=``, brackets or quotes. The values of keys that
accept any text are quoted before Hydra's parser reads them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from petra.errors import ConfigError, PetraError, accepts, invalid, require

from .catalogue import CONF, all_keys, configurations
from .schema import GROUPS

WORD = re.compile(r"(?P<key>\+{0,2}[\w./@$-]+)=(?P<value>.*)", re.DOTALL)
"""An override that sets a key."""
PIECES = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,\[\]()]+""")
"""Quoted texts, and what is between the separators of lists, sweeps and functions."""
FLAGS = ("--nproc", "--multirun", "--config-dir", "--cfg", "--trust", "--help")
"""Flags of commands that compose a configuration, for messages."""
HYDRA_FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--info", "-i", "--run", "-r", "--multirun", "-m"),
    *("--cfg", "-c", "--resolve", "--config-dir", "-cd"),
)
"""Flags of Hydra's parser that have a meaning here."""
SWEPT = "such as 'run_dir=runs/k${k}' for the folders of a sweep over k"
WARNS = "no such key, since petra prints its warnings itself"
INSTEAD: dict[str, tuple[Any, str]] = {
    "run.dir": (".", "run_dir=FOLDER, the folder of the run"),
    "sweep.dir": ("runs", f"run_dir, {SWEPT}"),
    "sweep.subdir": (".", f"run_dir, {SWEPT}"),
    "output_subdir": (None, "run_dir=FOLDER, which contains the configuration"),
    "job.chdir": (None, "run_dir=FOLDER; petra stays in the working directory"),
    "job.env_set": ({}, "variables in the environment (NAME=VALUE petra train ...)"),
    "job.env_copy": ([], "variables in the environment (NAME=VALUE petra train ...)"),
    "verbose": (False, WARNS),
    "job_logging": (..., WARNS),
    "hydra_logging": (..., WARNS),
    "callbacks": ({}, "logger._target_=module.function, a logger of your own"),
    "launcher._target_": ("hydra._internal.core_plugins.basic_launcher.BasicLauncher", "one command for each run"),
}
"""Keys of Hydra without a meaning in petra: the only value that files may have (...: any), and what to set instead."""
HONOURED = re.compile(r"hydra[./](mode|searchpath|sweeper|help|hydra_help|job\.(name|id|config))\b.*")
"""Keys of Hydra that work as Hydra documents them."""


def as_typed(words: Sequence[str]) -> list[str]:
    """Return overrides for Hydra's parser, in which values of keys that accept any text are quoted if Hydra would change them."""
    return [_as_typed(word) for word in words]


def _as_typed(word: str) -> str:
    found = WORD.fullmatch(word)
    name = found["key"].lstrip("+") if found else ""
    if found is None or name not in (known := text_keys()):
        return word
    key, value, several = found["key"], found["value"], known[name]
    try:
        read = OverridesParser.create().parse_override(word).value()
    except HydraException:  # a text is what was typed, but what looks like a sweep or begins with a quote may be a mistake
        raw = not several and bool(value) and value[0] not in "'\"" and "," not in value
        if not raw:
            return word
    else:
        raw = not several and isinstance(read, list | dict)
    return f"{key}={quoted(value)}" if raw else f"{key}={PIECES.sub(_quoted_number, value)}"


def quoted(text: str) -> str:
    """Return a text in quotes for Hydra's parser."""
    return QuotedString(text, Quote.single).with_quotes()


def _quoted_number(found: re.Match[str]) -> str:
    """Return a piece of a value, in quotes if Hydra reads it as a number or truth value."""
    text = found[0].strip()
    if re.fullmatch(r"[+-]?[\d._]*[\d.](e[+-]?[\d_]+)?|[+-]?(inf|nan)|true|false", text, re.IGNORECASE):
        return quoted(text)
    return found[0]


@cache
def text_keys() -> dict[str, bool]:
    """Return the full names of the keys that accept any text, and whether they are lists of texts."""
    return {name: not key.is_text for name, key in all_keys().items() if key.is_text or key.is_texts}


def read_overrides(words: Sequence[str]) -> DictConfig:
    """Return the keys that overrides set, each with one value, for a configuration that exists.

    Raises:
        ConfigError: If a word is no override that sets a key to a value.
    """
    overrides = OmegaConf.create()
    for word, typed in zip(words, as_typed(words), strict=True):
        require(WORD.fullmatch(word) is not None, "command line", "key=value", word)
        try:
            override = OverridesParser.create().parse_override(typed)
        except HydraException as error:
            raise unparsed(word, error) from error
        require(not override.is_sweep_override(), override.key_or_group, "one value", word.partition("=")[2])
        OmegaConf.update(overrides, override.key_or_group, override.value(), force_add=True)
    return overrides


def unparsed(word: str, error: Exception) -> PetraError:
    """Return the error for an override that Hydra can't parse, with a quoted value if that is what is missing."""
    key, equals, value = word.partition("=")
    plain = not set(value) & set("[]{}'\"$") or text_keys().get(key.lstrip("+~")) is False
    if equals and re.fullmatch(r"[+~]*[\w./@]+", key) and value and plain:
        shell = re.sub(r'(["\\$`])', r"\\\1", f"{key}={quoted(value)}")
        return invalid(key, f'a value in Hydra\'s syntax; quote it twice in the shell: "{shell}"', value)
    reason = next((line for line in str(error).splitlines() if not line.startswith("Error parsing")), "")
    return invalid("command line", "an override in Hydra's syntax", " ".join(f"{word} ({reason})".split()))


def as_word(value: object) -> str:
    """Return a value as an override has it: with the digits that give the same number back."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def keys_of(overrides: Sequence[str]) -> set[str]:
    """Return the keys that overrides set."""
    return {override.lstrip("+~").partition("=")[0] for override in overrides}


def check_words(words: Sequence[str]) -> None:
    """Check that flags are known, and that keys of Hydra have a meaning.

    Raises:
        ConfigError: If one is not. The message names what may be meant.
    """
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in HYDRA_FLAGS:
            raise unknown_flag(word)
    for flag, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, folder = flag.partition("=")
        if name in ("--config-dir", "-cd"):
            _check_own_files(Path(folder if equals else following))
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if re.match(r"hydra[./]", name) and not HONOURED.fullmatch(name):
            short = name[6:].replace("/", ".")
            instead = [
                text for key, (_, text) in INSTEAD.items() if f"{key}.".startswith(f"{short}.") or short.startswith(f"{key}.")
            ]
            raise invalid(name, instead[0] if instead else "a key of petra", word.partition("=")[2])


def check_hydra() -> None:
    """Check that no file of a configuration sets a key of Hydra that has no meaning.

    Raises:
        ConfigError: If one does.
    """
    config: Any = HydraConfig.instance().cfg
    for key, (accepted, instead) in INSTEAD.items():
        found = OmegaConf.select(config, f"hydra.{key}")
        require(accepted is ... or found == accepted or not (found or accepted), f"hydra.{key}", instead, found)


def _check_own_files(folder: Path) -> None:
    """Check that no file of ``--config-dir`` has the place of one of petra's own, which Hydra would read instead."""
    for path in sorted(folder.glob("**/*.yaml")):
        group, name = path.relative_to(folder).parent.as_posix(), path.stem
        own = (Path(CONF) / path.relative_to(folder)).exists() or (group in GROUPS and name in configurations(group))
        require(not own, "--config-dir", f"a file of another name than {group}/{name}, which petra has, too", path)


def unknown_flag(word: str, flags: Collection[str] = FLAGS) -> PetraError:
    """Return the error for a flag that doesn't exist, with the nearest flag or key.

    Args:
        flags: The flags that exist.
    """
    flag, _, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    known = {**dict.fromkeys(GROUPS), **all_keys()}
    short = {full.rpartition(".")[2]: full for full in reversed(list(known))}
    if near := get_close_matches(flag, flags, 1, 0.8):
        return ConfigError(f"command line: no flag {flag}; did you mean {near[0]}?")
    if near := [name] if name in known else get_close_matches(name, short, 1, 0.8):
        key = known.get(full := short.get(near[0], near[0]))
        value = value or ("true" if key is not None and accepts(key.hint, True) else "VALUE")
        return ConfigError(f"command line: no flag {flag}; did you mean {full}={value}?")
    return ConfigError(f"command line: no flag {flag}; keys are set by KEY=VALUE, and --help lists both")
