"""Commands in the documents: each names modules and files that there are, and overrides that make a run."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from launch.config import register, to_config
from launch.sweep import jobs
from launch.train import CONF

ROOT = Path(__file__).parents[1]
OVERRIDE = re.compile(r"(?:^|[\s'\"])((?:[a-z]+\.)?[a-z_]+=[^\s'\"]+)")


def commands() -> list[str]:
    """The commands of docs/clusters.md, without their comments, lines joined that belong together."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [line for line in (line.partition("   #")[0].strip() for line in blocks.splitlines()) if line]


@pytest.mark.parametrize("command", commands())
def test_a_command_means_something(command: str) -> None:
    for module in re.findall(r"(?:-m|--module|MODULE=) ?([a-z]+\.[a-z]+)", command):
        assert find_spec(module), module
    for path in re.findall(r"(?<![\w./-])((?:docker|launch)/[\w.]+)", command):
        assert (ROOT / path).is_file(), path
    overrides = [text for text in OVERRIDE.findall(command) if not text.startswith(("memlock=", "jobset"))]
    for job in jobs(overrides, Path("out")):
        with initialize_config_dir(CONF, version_base="1.3"):
            to_config(compose("config", list(job.overrides)))


def test_settings_that_the_page_lists_have_these_defaults() -> None:
    register()
    with initialize_config_dir(CONF, version_base="1.3"):
        config = compose("config")
    rows = re.findall(
        r"^\| `(cluster|trainer)\.(\w+)` \| (\S+)(?: s)? \|", (ROOT / "docs" / "clusters.md").read_text(), re.MULTILINE
    )
    assert {key for group, key, _ in rows if group == "cluster"} == set(config.cluster)
    for group, key, default in rows:
        assert config[group][key] == yaml.safe_load(default)
