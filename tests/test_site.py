"""The documentation site: it builds without a warning, its navigation is complete, and each public name has its entry."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.structure import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A broken link or anchor, and a page that the navigation lacks, are warnings, which end the build."""
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason="needs pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.processes
@pytest.mark.parametrize(
    "package", ["petra", *(f"petra.{name}" for name in ("reversible", "models", "data", "training", "nn", "plan", "staleness"))]
)
def test_every_public_name_has_an_entry(site: Path, package: str) -> None:
    entries = set(re.findall(r'id="([\w.]+)"', (site / "api" / package / "index.html").read_text(encoding="utf-8")))
    assert {f"{package}.{name}" for name in import_module(package).__all__} <= entries


@pytest.mark.processes
def test_docstrings_show_no_markup_of_another_language(site: Path) -> None:
    for page in (site / "api").rglob("*.html"):
        assert not re.findall(r":(?:class|func|meth|data|mod|attr):", page.read_text(encoding="utf-8")), page
