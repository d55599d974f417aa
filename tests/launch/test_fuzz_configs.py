"""Random configurations: each must train a few steps of a tiny network, or raise an error of one line. None may hang.

The tests try five; ``pytest tests/launch/test_fuzz_configs.py --hypothesis-profile=long`` tries 2,000.

A command line has a file of each group, settings that keep model and data small, and a few random overrides of any key of the
schema: values from files under conf/, values of other types or out of range, and misspelt keys. It goes through Hydra, the plan
and the pipeline as in ``launch.train``. One in fifty is a whole run with its folder. Sizes stay small, because a model that is too
large for the machine is a valid configuration.
"""

import faulthandler
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.config.catalogue import CONF, all_keys, configurations
from launch.config.compose import compose_overrides
from launch.config.schema import Config
from launch.run.build import set_up
from launch.run.costs import stage_map, tune_setup
from launch.run.resume import find_start, load_start
from launch.run.training import run
from petra.errors import PetraError
from petra.training import limited
from tests.support.commands import ALONE

SECONDS = 900
"""Limit of one configuration: a command line that hangs ends the tests with its traceback."""
SMALL = ("revnet18", "revgpt", "revgpt", "revgpt", "revgpt", "revgpt", "resnet18", "revnet38")
GROUPS = ("method", "remedy", "optim", "schedule", "logger")

Override = str


def written(value: Any) -> str:
    """Return a value in Hydra's syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def values_of_files() -> dict[str, list[str]]:
    """Return all values of each key in the files under conf/."""
    found: dict[str, dict[str, None]] = {}
    for path in Path(CONF).rglob("*.yaml"):
        section = path.parent.name
        for key, value in yaml.safe_load(path.read_text()).items():
            nested = value.items() if isinstance(value, dict) else [(None, value)]
            for name, one in nested:
                full = f"{key}.{name}" if name else key if path.parent == Path(CONF) else f"{section}.{key}"
                found.setdefault(full, {})[written(one)] = None
    return {key: list(values) for key, values in found.items()}


KEYS, KNOWN = list(all_keys()), values_of_files()
SIZES = {"data.images", "data.workers", "data.classes", "data.size", "data.batch_size"}
SIZES |= {f"model.{key}" for key in ("depth", "dim", "width", "heads", "patch", "cardinality", "base_width")}
NEVER = {"run_dir", "trainer.compile"}
"""Keys that would write to other folders, compile for minutes, or use the network."""
INTEGERS = ["-1", "0", "1", "2", "3", "4", "5", "8", "9", "-0.5", "0.0", "0.0625", "0.5", "1.0"]
HUGE = f"1.5 1e-12 1e300 nan inf -inf 1000000000 {2**63} {10**30} -1000000000000".split()
WORDS = ["''", "auto", "none", "abc", "true", "false", "ä", "'../x'", '"\\0"', "dynamic", "bf16", "fp16", "edge", "skip", "null"]
NESTED = ["[]", "[1]", "[0]", "[1,2]", "[2,1]", "[1,1,1]", "[-1]", "[1.5]", "[null]", "[a,b]", "[[1]]", "{a:1}", "{}"]
LISTS = ["[2,2,2,2,2]", "[1,0,2,1,1,1,1,1,1]", "[input,graph]", "[nothing,nothing,nothing]", "[0.9,0.99]", "[0.9,1.0]", "[1,3,2]"]
BROKEN = ["${k}", "${nothing}", "${oc.env:NOT_SET}", "[1", "{a", "1,2", "range(1,3)", "???", "'"]


def override(chance: random.Random) -> Override:
    """Return a valid or invalid override of any key."""
    key = chance.choice([key for key in KEYS if key not in NEVER])
    many = INTEGERS if key in SIZES else INTEGERS + HUGE
    known = INTEGERS if key in SIZES else KNOWN.get(key, [])
    value = chance.choice(known if known and chance.random() < 0.6 else many + WORDS + NESTED + LISTS)
    kind = chance.randrange(30)
    if kind == 0:
        value = chance.choice(BROKEN)
    if kind == 1:
        place = chance.randrange(len(key))
        key = key[:place] + chance.choice(["", "x", "."]) + key[place + 1 :]
    if kind == 2:
        key = chance.choice(["+", "++", "~"]) + key
    return chance.choice([key, f"{key}="]) if kind == 3 else f"{key}={value}"


def command_line(chance: random.Random) -> list[Override]:
    """Return a command line. If it ends with ``whole``, it stands for a whole run."""
    model = chance.choice(SMALL if chance.random() < 0.99 else [*configurations("model")])
    texts = (model == "revgpt") ^ (chance.random() < 0.03)
    data = "text" if texts else chance.choice(["synthetic", "synthetic", "synthetic", "synthetic", "digits", "cifar10"])
    line = [f"model={model}", f"data={data}", "trainer.device=cpu", "trainer.epochs=2", "data.batch_size=3"]
    line += ["data.size=8"] if data in ("synthetic", "text") else []
    line += ["data.images=24"] if data == "synthetic" else []
    line += ["data.root=TEXT"] if data == "text" else []
    line += ["model.depth=2", "model.dim=8", "model.heads=2"] if model == "revgpt" else []
    line += ["model.width=0.0625"] if model in ("revnet18", "resnet18") else []
    line += [f"{group}={chance.choice([*configurations(group)])}" for group in GROUPS if chance.random() < 0.4]
    line += [f"k={chance.choice((1, 2, 9))}"] if chance.random() < 0.6 else []
    line += [override(chance) for _ in range(chance.choice((0, 1, 1, 2, 3, 4)))]
    return [*line, "whole"] if chance.random() < 0.02 else line


command_lines = st.randoms(use_true_random=True).map(command_line)
"""Each example comes from one random seed. Hypothesis itself would vary few examples in small steps, with less breadth."""


def attempt(line: list[Override], folder: Path) -> None:
    """Run a command line.

    Raises:
        Exception: If the command line fails with anything but a one-line :class:`petra.errors.PetraError`.
    """
    try:
        config = compose_overrides([word.replace("TEXT", str(folder / "text")) for word in line if word != "whole"])
        if "whole" in line:
            config.run_dir = config.run_dir or str(folder / f"run{next(_RUNS)}")
            config.trainer.limit_batches = config.trainer.limit_batches and min(config.trainer.limit_batches, 2)
            config.trainer.epochs = min(config.trainer.epochs, 1)
            run(config, ALONE)
        else:
            steps(config)
    except PetraError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"an error of no line or several: {str(error)!r}") from error


_RUNS = count()


def steps(config: Config) -> None:
    """Train a few steps as :func:`launch.train.run` does, without the run's folder."""
    checked = set_up(config, ALONE)
    if config.dry_run:
        stage_map(checked)
        return
    start = find_start(config, ALONE)
    checked = tune_setup(checked, ALONE, start.facts.get("chosen"))
    train, test = checked.data()
    batches = limited(train.batches_per_epoch, config.trainer.limit_batches)
    pipeline = checked.pipeline(batches)
    load_start(pipeline, config, start, batches)
    pipeline.train(train, min(config.k + 1, 10))
    pipeline.evaluate(test, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the file that command lines name."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text").write_bytes(bytes(random.Random(0).choices(b"abc def\n", k=4000)))
    return folder


@settings(max_examples=5 if settings.default.max_examples == 100 else 2000)
@given(line=command_lines)
def test_a_random_configuration_runs_or_is_one_error(line: list[str], folder: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            attempt(line, folder)
    finally:
        faulthandler.cancel_dump_traceback_later()
        torch.set_num_threads(1)
