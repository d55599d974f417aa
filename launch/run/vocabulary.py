"""Check that a network reads tokens of the vocabulary with which it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from petra.errors import DataError, require

SHOWN = 12
"""Digits of a fingerprint in messages."""


def require_vocabulary(name: str, found: str | None, facts: Mapping[str, Any], source: Path) -> None:
    """Check that a vocabulary is the one with which weights were trained. An unknown vocabulary passes.

    Args:
        name: Key or file with the vocabulary, for the message.
        found: Its fingerprint (:func:`petra.data.tokenizer.fingerprint`), or None if it is unknown.
        facts: Facts of the weights.
        source: File or folder of the weights.

    Raises:
        DataError: If it is another vocabulary.
    """
    trained = facts.get("vocabulary")
    if trained is not None and found is not None:
        expected = f"tokens of the vocabulary {trained[:SHOWN]}, with which {source} was trained"
        require(found == trained, name, expected, f"those of {found[:SHOWN]}", DataError)
