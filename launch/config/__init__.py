"""Configuration: schema, checks, composition and one-line errors."""

from pathlib import Path

CONF = str(Path(__file__).parents[2] / "conf")
"""Folder of the configuration files."""
