"""Subclasses of ``Trainer``, such as those of TRL, in a pipeline."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import transformers

from petra.errors import require
from petra.huggingface.trainer import PetraTrainer


class _Settings(PetraTrainer):
    """Has got its own arguments before ``__init__``."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named, **self.__dict__.pop("_settings"))


def pipelined(kind: type) -> Any:
    """Return a class like ``kind``, such as ``SFTTrainer`` of ``trl``, that trains in a pipeline.

    Its arguments are those of ``kind`` and those of :class:`PetraTrainer`. Methods of ``Trainer`` that ``kind`` overrides must be
    called by a pipeline, which is checked when a trainer is made.

    Args:
        kind: A subclass of ``transformers.Trainer``.

    Raises:
        ConfigError: If it is no such class.
    """
    is_trainer = isinstance(kind, type) and issubclass(kind, transformers.Trainer)
    require(is_trainer, "pipelined", "a subclass of transformers.Trainer", getattr(kind, "__name__", type(kind).__name__))
    if issubclass(PetraTrainer, kind):
        return PetraTrainer
    own = [name for name, each in signature(PetraTrainer.__init__).parameters.items() if each.kind is Parameter.KEYWORD_ONLY]

    made: Any = type(f"Petra{kind.__name__}", (kind, _Settings), {"__doc__": kind.__doc__, "__module__": __name__})

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        self.__dict__["_settings"] = {name: named.pop(name) for name in own if name in named}
        super(made, self).__init__(*arguments, **named)

    made.__init__ = __init__
    return made
