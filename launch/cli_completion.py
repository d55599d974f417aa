"""Print a script that completes words with TAB: ``eval "$(petra completion bash)"`` in ~/.bashrc, or ``zsh`` in ~/.zshrc.

The script calls ``petra completion words LINE``, which prints the candidates for the last word of a line. Candidates are read
from the schema, the files under conf/, and the source of petra and of the commands, because importing them would take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from petra.errors import accepted, alternatives, require

from .cli_commands import IN_SEVERAL_PROCESSES, commands, source
from .config import CONF
from .config.presets import method_presets
from .config.read import all_keys
from .config.schema import GROUPS

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
    return sorted({text for text in found if text.startswith(word)})


def flags(command: str) -> Iterator[str]:
    """Yield the flags of a command."""
    text = source(command).read_text(encoding="utf-8")
    yield from re.findall(r'"(--[a-z][\w-]*)"', text)
    yield from HYDRA if "command_line_configs" in text else ("--help",)
    if command in IN_SEVERAL_PROCESSES:
        yield "--nproc"


def keys(word: str, roots: list[Path]) -> Iterator[str]:
    """Yield the keys of the top level and the groups, or the keys of the group that the word begins with."""
    yield from (f"{key}=" for key in all_keys() if "." not in key or "." in word)
    if "." not in word:
        folders = {path.name for root in roots for path in root.iterdir() if path.is_dir()}
        for name in {*folders, *GROUPS}:
            yield f"{name}="
            if name in GROUPS:
                yield f"{name}."


def values(word: str, roots: list[Path]) -> Iterator[str]:
    """Yield values of a group or of a key. Words before a comma are kept, for a sweep."""
    key, _, value = word.partition("=")
    head = word[: len(word) - len(value.rpartition(",")[2])]
    known = all_keys().get(key)
    if known is not None:
        yield from (head + name for name in accepted(known.hint) if re.fullmatch(r"[\w-]+", name))
    elif "." not in key:
        found = [str(path.relative_to(root / key).with_suffix("")) for root in roots for path in (root / key).rglob("*.yaml")]
        yield from (head + name for name in [*found, *(method_presets() if key == "method" else ())])
