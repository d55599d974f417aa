"""Pages tell the truth: commands parse, compose and plan, snippets run, links lead somewhere, made pages are up to date."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from itertools import chain, pairwise, product
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch import Tensor, nn
from torch.distributed.run import get_args_parser

import petra
from benchmarks.records import RECORDS
from docs import schedules
from docs.reference import page
from docs.words import GENERATED, LIMITS, counted
from examples.own_model import Patches, branch
from launch.cli import take_processes
from launch.config.compose import compose_overrides
from launch.config.schema import Config
from launch.run.build import set_up
from launch.run.folder import records_in
from launch.runtime.rank import Process
from petra import ConfigError, Model, TensorSpec
from tests.structure import ROOT

pytestmark = pytest.mark.usefixtures("shared_profiles")

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *(page for pattern in ("docs/*.md", "docs/evidence/*.md") for page in sorted(ROOT.glob(pattern))),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples/remedies", "reproduction")),
]
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:petra|python|torchrun|pytest|make|docker|git|pip) [\w.-]")
TRAINS = ("launch.train", "launch.node", "benchmarks.nodes")
GROUPS = "model|data|method|remedy|optim|outer|schedule|trainer|checkpoint|cluster|logger|experiment"
KEY = re.compile(rf"(?:k|dp|seed|run_dir|resume|resume_change|init_from|init_skip|dry_run|(?:{GROUPS})(?:\.\w+)?)=\S+")
OTHERS = {
    ".",
    "apptainer",
    "apt-get",
    "docker",
    "docker/two_nodes.sh",
    "enroot",
    "git",
    "kubectl",
    "petra",
    "pytest",
    "rm",
    "sbatch",
    "srun",
}
"""Programs that aren't run; what their command lines name is checked all the same."""
SHORTER = {
    "training_script.md": {
        "digits.images": "digits.images[:96]",
        "digits.target": "digits.target[:96]",
        "1440": "64",
        "width=0.25": "width=0.0625",
    },
}
"""What stands in a page's snippets in place of their own sizes, when they run here."""


def inline(text: str) -> list[str]:
    """Return all `code` outside of fenced blocks, each on one line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def commands(path: Path) -> Iterator[str]:
    """Yield the commands of a page, in blocks and in sentences, without comments. Continued lines are joined."""
    text = path.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language == "sh":
            lines = block.replace("\\\n", " ").splitlines()
            yield from (line for line in (re.split(r"\s+# ", line)[0].strip() for line in lines) if line)
    yield from (code for code in inline(text) if COMMAND.match(code) and "…" not in code)


def split(command: str) -> list[str]:
    """Return the words of a command, with ``petra COMMAND`` as the module that it runs in a checkout."""
    words = shlex.split(command)
    start = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    if words[start] != "petra" or len(words) < start + 2 or words[start + 1].startswith("-"):
        return words
    name, *rest = words[start + 1 :]
    processes, rest = take_processes(rest)
    if processes is None:
        return [*words[:start], "python", "-m", f"launch.{name}", *rest]
    if name == "train":
        return [*words[:start], "python", "-m", "launch.train", "--nproc", str(processes), *rest]
    return [*words[:start], "torchrun", "--nproc-per-node", str(processes), "-m", f"launch.{name}", *rest]


COMMANDS = [pytest.param(command, id=f"{path.name}: {command}") for path in PAGES for command in dict.fromkeys(commands(path))]
by_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_means_something(command: str, tmp_path: Path) -> None:
    words = split(command.replace("--nproc N", "--nproc 2"))
    environment: dict[str, str] = {}
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    for module in re.findall(r"(?:-m|--module|MODULE=) ?([a-z_]+(?:\.[a-z_]+)+)", command):
        assert find_spec(module), module
    for named in re.findall(r"(?<![\w./-])((?:docker|launch|examples|tests|benchmarks|reproduction)/[\w./]*\w)(?![\w*])", command):
        assert (ROOT / named).exists(), named
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[0] in ("python", "torchrun"):
        check_python(words, environment, tmp_path)
    elif words[0] == "pip":
        extras = re.findall(r"\w+", words[-1].partition("[")[2])
        assert words[1] == "install"
        assert set(extras) <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    else:
        assert words[0] in OTHERS, f"no check for {words[0]}"
        for chosen in runs([text for text in re.split(r"[\s'\"]+", command.partition(words[0])[2]) if KEY.fullmatch(text)]):
            configured(*chosen)


def runs(overrides: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of each run of a command, of several with --multirun."""
    choices = []
    for text, parsed in zip(overrides, OverridesParser.create().parse_overrides(overrides), strict=True):
        values = parsed.sweep_string_iterator() if parsed.is_sweep_override() else ()
        choices.append([f"{text.partition('=')[0]}={value}" for value in values] or [text])
    yield from product(*choices)


def check_python(words: list[str], environment: dict[str, str], out: Path) -> None:
    """Checks torchrun's flags, the module's, and that the configuration plans for so many processes."""
    world = 1
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args([word if word != "N" else "2" for word in words[1:]])
        world, module, rest = int(parsed.nproc_per_node), parsed.training_script, parsed.training_script_args
    elif words[1] != "-m":
        return  # a file, of which it is known that it exists
    else:
        module, rest = words[2], words[3:]
    flags = {word for word in rest if re.fullmatch(r"--[\w-]+", word)}
    if module.startswith("launch.") and find_spec(module):  # the change log names commands that have left
        assert not re.search(r"``|::|\|--", usage(module)), "help of petra has no markup"
    assert flags <= {"--help"} or flags <= set(re.findall(r"--[\w-]+", usage(module)))
    assert not any(word.startswith("[") for word in rest), "notation of a manual, not a command"
    values = dict(pairwise(rest))
    if module == "docs.schedules":
        drawing = out / Path(values["--out"]).name
        schedules.main([*rest, "--out", str(drawing)])
        kept = ROOT / "docs" / "figures" / drawing.name
        assert not kept.exists() or labels(kept) == labels(drawing)
    if module not in (*TRAINS, "launch.doctor"):
        return
    overrides = [word for word in rest if KEY.fullmatch(word)]
    if "model=huggingface" in overrides or any(word.startswith("model.path=") for word in overrides):
        return  # tests/huggingface runs it on a checkpoint
    positional = set(rest) - flags - {values.get(flag) for flag in flags} - set(overrides)
    if module == "benchmarks.nodes":
        world = sum(map(int, positional.pop().split(",")))
    assert not positional
    for flag in flags & {"--nproc", "--processes"}:
        world = int(values[flag])
    if "NNODES" in environment:
        processes = [int(n) for n in environment["NPROC_PER_NODE"].split(",")]
        world = sum(processes) if len(processes) > 1 else processes[0] * int(environment["NNODES"])
    for chosen in runs(overrides):
        plan(world, *chosen)
        config = configured(*chosen)
        assert config.schedule.options["warmup_epochs"] < config.trainer.epochs, "the learning rate never reaches its peak"


@cache
def usage(module: str) -> str:
    """Return what a module, or the ``command`` or ``__main__`` module of a package, prints for ``--help``."""
    found = import_module(module)
    if not hasattr(found, "main"):
        found = import_module(f"{module}.{'command' if find_spec(f'{module}.command') else '__main__'}")
    main = found.main
    with redirect_stdout(StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [module, "--help"])
        with suppress(SystemExit):  # Hydra's help doesn't raise it
            main()
    return printed.getvalue()


def labels(drawing: Path) -> list[str]:
    """What stands in a drawing: title, stages, and microbatches in the order in which they are drawn."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", drawing.read_text(encoding="utf-8"))


@cache
def configured(*overrides: str) -> Config:
    """Return the configuration of a command line. Pages repeat command lines."""
    return compose_overrides([*overrides])


@cache
def plan(world: int, *overrides: str) -> None:
    """Plan a command line's run in ``world`` processes on the CPU."""
    config = configured(*overrides)
    set_up(replace(config, trainer=replace(config.trainer, device="cpu")), Process(0, world, 0, world))


@by_page
def test_settings_in_sentences_are_settings(path: Path) -> None:
    if path.name == "configuration.md":
        return  # made, and every file of every group is planned by another test
    for code in inline(path.read_text(encoding="utf-8")):
        if all(KEY.fullmatch(word) for word in code.split()) and not re.search(r"=[A-Z<]|=own\b|experiment=", code):
            try:
                configured(*code.split())
            except ConfigError as error:  # a key of another model or data set than the default
                if "expected null for " not in str(error):
                    raise


@by_page
def test_names_in_sentences_are_names_of_the_library(path: Path) -> None:
    """Modules and what they contain, and methods of the classes that ``petra`` exports."""
    if path.name == "CHANGELOG.md":
        return  # it also has former names
    for code in inline(path.read_text(encoding="utf-8")):
        found = re.findall(r"\bpetra(?:\.[A-Za-z_]\w*)+", code)
        method = re.match(r"([A-Z]\w+)\.\w+", code)
        found += [f"petra.{method[0]}"] if method and method[1] in petra.__all__ else []
        for name in found:
            assert name.startswith("petra.launch") or locate(name) is not None, name


def test_quoted_outcomes_of_training_are_those_of_records() -> None:
    """Accuracies in percent with two decimals and losses with four, outside of code: of a run, or the mean over its seeds."""
    runs = defaultdict[str, list[list[float]]](list)
    for file in (each for each in RECORDS.glob("*.jsonl") if each.name != "staleness.jsonl"):
        for name, record in records_in(file).items():
            text = json.dumps(record)
            outcomes = " ".join(re.findall(r'"\w*(?:loss|accuracy|test|validation|bits_per_byte)\w*": (\[[^]]*|[\d.]+)', text))
            runs[re.sub(r"_s\d+$", "", name)].append([float(text) for text in re.findall(r"\d+\.\d+(?:e-\d+)?", outcomes)])
    means = [[sum(each) / len(each) for each in zip(*group, strict=False)] for group in runs.values()]
    known = {text for value in chain(*means, *chain(*runs.values())) for text in (f"{value:.4f}", f"{100 * value:.2f}")}
    for path in PAGES:
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        assert {*re.findall(r"(?<![\d.])(?:\d\d\.\d\d(?= %| ±)|[1-9]\.\d{4}(?!\d))", text)} <= known, path


def test_other_pages_quote_at_most_three_outcomes_and_link_to_their_home() -> None:
    for path in {*PAGES} - {*RECORDS.parent.glob("*.md"), *(ROOT / name for name in GENERATED)}:
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        quoted = re.findall(r"(?<![\d.])(?:\d\d\.\d\d(?= %)|[1-9]\.\d{4}(?!\d)|\d+\.\d+ ± \d+\.\d+)", text)
        assert len(quoted) <= 3, f"{path}: {quoted}"
        assert not quoted or "evidence/" in text, path


def test_pages_are_as_short_as_promised() -> None:
    words = counted()
    assert {name: words[name] for name, limit in LIMITS.items() if words[name] > limit} == {}
    for path in (RECORDS.parent).glob("*.md"):
        name = path.relative_to(ROOT).as_posix()
        assert name not in words or words[name] <= LIMITS["evidence page"], name


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_links_and_names_of_files_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", FENCE.sub("", text)):
        if not target.startswith("https://"):
            page = path.parent / target if target else path
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), f"{target}#{anchor}"
    for code in inline(text):
        if (
            re.fullmatch(r"(?:petra|launch|conf|docs|docker|tests|examples|benchmarks|reproduction)/[\w./]*", code)
            and "SITE" not in code
        ):
            assert (ROOT / code).exists(), code


def test_every_page_is_in_the_index() -> None:
    indices = (ROOT / "docs" / "README.md", RECORDS.parent / "README.md")
    links = ((index.parent, target) for index in indices for target in re.findall(r"\]\(([\w./]+\.md)\)", index.read_text()))
    assert {(folder / target).resolve() for folder, target in links} == {*PAGES} - {indices[0], ROOT / "README.md"}


def test_the_configuration_page_is_up_to_date() -> None:
    assert page() == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), "python -m docs.reference has news"


class Head(nn.Linear):
    """Both streams, averaged over the image, to classes."""

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return super().forward(torch.cat([x1, x2], dim=1).mean((2, 3)))


@by_page
def test_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With modules of a user's own where a page has only their names."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"nn": nn, "MyStem": Patches, "MyHead": Head, "stem": Patches(8), "f": branch(8), "head": Head(16, 10)}
    scope["sequential"] = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    for code in (code for language, code in FENCE.findall(path.read_text(encoding="utf-8")) if language == "python"):
        assert len(code.splitlines()) <= 20
        for long, short in SHORTER.get(path.name, {}).items():
            assert long in path.read_text(encoding="utf-8")
            code = code.replace(long, short)
        exec(compile(code, str(path), "exec"), scope)
        if isinstance(model := scope.get("model"), Model):
            assert model.profile(TensorSpec((2, 3, 32, 32), torch.float32))


@pytest.mark.processes
def test_the_site_builds_and_has_an_entry_for_every_public_name(tmp_path: Path) -> None:
    """A broken link or anchor, and a page that the navigation lacks, are warnings, which end the build."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for package in ("petra", *(f"petra.{name}" for name in ("reversible", "models", "data", "training", "plan", "staleness"))):
        entries = set(re.findall(r'id="([\w.]+)"', (tmp_path / "api" / package / "index.html").read_text(encoding="utf-8")))
        assert {f"{package}.{name}" for name in import_module(package).__all__} <= entries
    for path in (tmp_path / "api").rglob("*.html"):  # docstrings show no markup of another language
        assert not re.findall(r":(?:class|func|meth|data|mod|attr):", path.read_text(encoding="utf-8")), path
