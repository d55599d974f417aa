"""Tests of calls that are refused, from tables of arguments and messages."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from petra.errors import ConfigError, PetraError

Errors = type[PetraError] | tuple[type[PetraError], ...]


def refuses(call: Callable[..., object], *cases: tuple[Any, ...], kind: Errors = ConfigError) -> Callable[..., None]:
    """Return a test that a function raises an error of one line for each of several arguments.

    Args:
        cases: Arguments of the function, and last its message, or a pattern or a part of it.
        kind: Types of the errors.
    """

    @pytest.mark.parametrize("case", cases, ids=lambda case: str(case[-1])[:80])
    def test(case: tuple[Any, ...]) -> None:
        *arguments, message = case
        with pytest.raises(kind) as caught:
            call(*arguments)
        text = str(caught.value)
        assert message in text or re.search(message, text), text
        assert "\n" not in text

    return test
