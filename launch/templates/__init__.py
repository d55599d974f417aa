"""Files that commands fill in: pages, and jobs of clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def page_template(name: str) -> Any:
    """Return the template of a page, which is filled in by ``render``."""
    from jinja2 import Environment, FileSystemLoader

    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True).get_template(name)
