"""Print a script that completes words with TAB: ``eval "$(petra completion bash)"`` in ~/.bashrc, or ``zsh`` in ~/.zshrc.

The script calls ``petra completion words LINE``, which prints the candidates for the last word of a line. Candidates are read
from the files under conf/ and from the source of the commands, because importing the schema would take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from petra.errors import alternatives, require

from .cli_commands import IN_SEVERAL_PROCESSES, commands, source
from .config import CONF
from .config.presets import presets

CONFIGURED = ("train", "node", "sweep", "doctor", "evaluate", "generate", "predict")
"""Commands that accept keys of the configuration."""
HYDRA = ("--cfg", "--config-dir", "--help", "--multirun")
SCRIPTS = {
    # Bash splits words at = and : and replaces only the last part.
    "bash": r"""_petra_complete() {
    local line=${COMP_LINE:0:COMP_POINT} word kept candidate
    word=${line##*[[:space:]]}
    [[ $COMP_WORDBREAKS == *=* ]] && kept=${word%"${word##*[=:]}"}
    COMPREPLY=()
    while IFS= read -r candidate; do
        [[ $candidate ]] && COMPREPLY+=("${candidate#"$kept"}")
    done < <(petra completion words "$line" 2> /dev/null)
    [[ ${COMPREPLY[*]} == *[=.] ]] && compopt -o nospace 2> /dev/null
    return 0
}
complete -o default -F _petra_complete petra
""",
    "zsh": r"""#compdef petra
_petra_complete() {
    local -a found
    found=(${(f)"$(petra completion words "${(j: :)words[1,CURRENT]}" 2> /dev/null)"})
    if (( ${#found} )); then
        compadd -Q -S '' -- $found
    else
        compset -P '*='
        _files
    fi
}
compdef _petra_complete petra
""",
}


def main(words: list[str]) -> None:
    """Print the script of a shell, or the candidates for a line.

    Raises:
        ConfigError: If there is no script for the shell.
    """
    if words[:1] == ["words"] and len(words) == 2:
        print("\n".join(candidates(words[1])))
        return
    shell = words[0] if words else "nothing"
    require(shell in SCRIPTS, "completion", alternatives(list(SCRIPTS)), shell)
    print(SCRIPTS[shell], end="")


def candidates(line: str) -> list[str]:
    """Return the words that may stand in place of the last word of a command line."""
    *before, word = line.split()[1:] + ([""] if line[-1:].isspace() else [])
    if not before:
        found = [*commands(), "completion", "--help", "--version"]
    elif (command := before[0]) == "completion":
        found = [*SCRIPTS]
    elif command not in commands():
        found = []
    elif word.startswith("-"):
        found = [*flags(command)]
    elif command not in CONFIGURED:
        found = []
    else:
        extra = [Path(value) for flag, value in pairwise(before) if flag == "--config-dir"]
        roots = [Path(CONF), *extra]
        found = [*(values(word, roots) if "=" in word else keys(word, roots))]
        if command in ("evaluate", "generate", "predict") and "=" not in word:
            found += ["run=", "weights="]
    return sorted({text for text in found if text.startswith(word)})


def flags(command: str) -> Iterator[str]:
    """Yield the flags of a command."""
    text = source(command).read_text(encoding="utf-8")
    yield from re.findall(r'"(--[a-z][\w-]*)"', text)
    yield from HYDRA if re.search(r"compose_command_line|training_configs", text) else ("--help",)
    if command in IN_SEVERAL_PROCESSES:
        yield "--nproc"


def keys(word: str, roots: list[Path]) -> Iterator[str]:
    """Yield the keys of the top level and the groups, or the keys of the group that the word begins with."""
    group, dot, _ = word.partition(".")
    for root in roots:
        if dot:
            for path in root.glob(f"{group}/*.yaml"):
                yield from (f"{group}.{key}=" for key, _ in settings(path) if key != "name")
        else:
            for folder in (path for path in root.iterdir() if path.is_dir()):
                yield f"{folder.name}="
                if folder.name != "experiment":
                    yield f"{folder.name}."
            if (path := root / "config.yaml").exists():
                yield from (f"{key}=" for key, _ in settings(path))


def values(word: str, roots: list[Path]) -> Iterator[str]:
    """Yield values of a group or of a key. Words before a comma are kept, for a sweep."""
    key, _, value = word.partition("=")
    head = word[: len(word) - len(value.rpartition(",")[2])]
    group, _, name = key.rpartition(".")
    for root in roots:
        if "." not in key and (root / key).is_dir():
            yield from (head + str(path.relative_to(root / key).with_suffix("")) for path in (root / key).rglob("*.yaml"))
            yield from (head + name for name in presets(key))
            continue
        paths = root.glob(f"{group}/*.yaml") if group else root.glob("config.yaml")
        found = {value for path in paths for known, value in settings(path) if known == name}
        if found & {"true", "false"}:
            yield from (f"{head}true", f"{head}false")
        else:
            yield from (head + value for value in found if re.fullmatch(r"[A-Za-z]\w*", value) and value != "null")


def settings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the top-level keys of a file with their values as written."""
    yield from re.findall(r"^(\w+): ([^#\s].*?)(?: #.*)?$", path.read_text(encoding="utf-8"), re.MULTILINE)
