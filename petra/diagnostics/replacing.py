"""Replaces a method of one object for a while: how records and diagnoses watch a pipeline that knows nothing of them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def replace_method(undo: ExitStack, owner: object, name: str, method: Any) -> None:
    """``owner.<name>`` is ``method`` until ``undo`` closes; replacements may be nested."""
    own = vars(owner)
    nested, before = name in own, own.get(name)
    own[name] = method

    def restore() -> None:
        if nested:
            own[name] = before
        else:
            del own[name]

    undo.callback(restore)
