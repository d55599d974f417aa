"""Hooks of the documentation site (mkdocs.yml): navigation, pages from outside docs/, pages of the API, roles in docstrings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "reproduction/README.md": "reproduction.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/remedies/README.md": "remedies.md",
}
"""Files whose page of the site is not in docs/, or not of the same name: README is the home page."""
API = {
    "petra": "Pipelines, methods, models, settings",
    "petra.reversible": "Reversible blocks",
    "petra.models": "Networks",
    "petra.data": "Data sets and microbatches",
    "petra.training": "Epochs, optimizers, learning rates, checkpoints, export",
    "petra.inplace_abn": "InPlace-ABN",
    "petra.huggingface": "Models of Hugging Face's transformers",
    "petra.plan": "Plans",
    "petra.staleness": "Remedies for stale gradients",
    "petra.diagnostics": "Observers of a run",
    "petra.cost_model": "Predicted time and memory",
    "petra.analysis": "Figures, timelines and tables",
    "petra.errors": "Errors",
}
"""Packages and modules with a page of their public names."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation from the groups of the index, docs/README.md, and the pages of the API."""
    groups: dict[str, list[Any]] = {}
    for line in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").splitlines():
        if group := re.match(r"\| \*\*(.+?)\*\* \|", line):
            groups[group[1]] = []
        elif line.startswith("| ["):
            [*groups.values()][-1] += linked(line, Path("docs"))
    evidence = (ROOT / "docs" / "evidence" / "README.md").read_text(encoding="utf-8")
    groups["Evidence"] += [
        page for line in evidence.splitlines() if line.startswith("| [") for page in linked(line, Path("docs/evidence"))
    ]
    groups["API reference"] = ["api.md", *(f"api/{module}.md" for module in API)]
    groups["Development"] = groups.pop("Development")
    config.nav = ["index.md", "pages.md", *({name: pages} for name, pages in groups.items())]
    return config


def linked(line: str, folder: Path) -> list[str]:
    """Return the pages of the site for the links of a line in a page of a folder."""
    paths = [os.path.normpath(folder / target) for target in re.findall(r"\]\((.+?)\)", line)]
    return [PAGES.get(path, path.removeprefix("docs/")) for path in paths]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, the examples that pages link to, and the pages of the API."""
    files.remove(files.src_uris["README.md"])
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in (*(ROOT / "examples").glob("*.py"), *(ROOT / "stress").glob("*.csv"), ROOT / "CITATION.cff"):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    index = ["# API index", "Public names, with the first sentence of their descriptions."]
    for module, title in API.items():
        found = griffe.load(module, search_paths=[ROOT], extensions=griffe.load_extensions(Docstrings), resolve_aliases=True)
        assert isinstance(found, griffe.Module)
        files.append(File.generated(config, f"api/{module}.md", content=f"# {module}\n\n{title}.\n\n{directives(module, found)}"))
        rows = [f"| [`{name}`](api/{module}.md#{path}) | {summary} |" for name, path, summary in public_names(module, found)]
        index += [f"## [{module}](api/{module}.md)", f"{title}.", "\n".join(["| name | |", "|---|---|", *rows])]
    files.append(File.generated(config, "api.md", content="\n\n".join(index)))
    return files


def public_names(path: str, found: griffe.Module) -> Iterator[tuple[str, str, str]]:
    """Yield name, path in the documentation and first sentence of the public names of a module, or of the modules in it."""
    if found.exports is None and found.modules:
        for name, module in sorted(found.modules.items()):
            yield from public_names(f"{path}.{name}", module)
        return
    for name, member in found.members.items():
        if (
            member.is_public
            and not member.is_module
            and (found.exports is not None or not member.is_alias)
            and member.has_docstring
        ):
            text = member.docstring.value if member.docstring is not None else ""
            yield name, f"{path}.{name}", text.split("\n\n")[0].replace("\n", " ").replace("|", r"\|")


def directives(module: str, found: griffe.Module) -> str:
    """Return what mkdocstrings replaces by the documentation of a module: its ``__all__``, or the modules in it."""
    if found.exports is not None or not found.modules:
        return f"::: {module}\n"
    return "\n".join(
        f"## {module}.{name}\n\n::: {module}.{name}\n    options:\n      heading_level: 3\n" for name in sorted(found.modules)
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between the folders of the project lead to the pages and files of the site."""
    shown = {page: name for name, page in PAGES.items()}
    source = Path(shown.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    return relinked(markdown, source.parent, Path(page.file.src_uri).parent)


def relinked(markdown: str, folder: Path, shown: Path) -> str:
    """Return the text of a page in a folder of the project, with the links of the site, where it is in the folder ``shown``."""

    def link(found: re.Match[str]) -> str:
        path = os.path.normpath(folder / found[1])
        return f"]({os.path.relpath(PAGES.get(path, path.removeprefix('docs/')), shown)}"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)", link, markdown)


HIDDEN = ("__reduce_ex__",)
"""Members that no user calls by name."""


class Docstrings(griffe.Extension):
    """Rewrite docstrings for mkdocstrings."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Show ``:class:`petra.Pipeline``` as code, and list arguments that share a description one by one.

        Public names of petra are those of its imports for type checkers: it imports them on first use.
        """
        if pkg.name == "petra":
            own = [name for name, found in pkg.members.items() if found.is_alias and found.target_path.startswith("petra.")]
            pkg.exports = own
        rewrite(pkg)


def rewrite(found: griffe.Object) -> None:
    """Rewrite the docstrings of an object and of all objects in it."""
    if found.name in HIDDEN:
        found.docstring = None
    if found.docstring is not None:
        text = re.sub(r":(?:class|func|meth|data|mod|attr):(`[^`]+`)", r"\1", found.docstring.value)
        text = re.sub(r" ?::$", ":", text, flags=re.MULTILINE)  # an indented block follows, which Markdown shows as code
        found.docstring.value = SHARED.sub(one_by_one, text)
    for member in found.members.values():
        if isinstance(member, griffe.Object):
            rewrite(member)


SHARED = re.compile(r"^( +)((?:\w+, )+\w+)(: .*(?:\n\1 +.*)*)$", re.MULTILINE)
"""Arguments that share a description: indentation, names, description."""


def one_by_one(found: re.Match[str]) -> str:
    """Return a copy of the description for each argument."""
    return "\n".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(", "))
