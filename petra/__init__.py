"""Train deep networks in parallel with PETRA, an asynchronous pipeline of reversible blocks, and with related pipeline methods.

A :class:`Model` is a sequence of blocks. A :class:`Pipeline` assigns the blocks to stages, runs the stages in one or several
processes, and trains them with a :class:`Method`.

Each name is imported on first use, so that the command line does not wait for torch.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petra.engine.endpoints import Losses as Losses
    from petra.engine.options.extension import Extension as Extension
    from petra.engine.options.outer_step import OuterStep as OuterStep
    from petra.engine.recipe import Recipe as Recipe
    from petra.engine.totals import Result as Result
    from petra.errors import ConfigError as ConfigError
    from petra.errors import DataError as DataError
    from petra.errors import ModelError as ModelError
    from petra.errors import NumericsError as NumericsError
    from petra.errors import PetraError as PetraError
    from petra.errors import ScheduleError as ScheduleError
    from petra.hooks import Hook as Hook
    from petra.method import METHODS as METHODS
    from petra.method import Keep as Keep
    from petra.method import Method as Method
    from petra.method import Weights as Weights
    from petra.model import BlockSpec as BlockSpec
    from petra.model import Model as Model
    from petra.pipeline import Pipeline as Pipeline
    from petra.plan import Plan as Plan
    from petra.plan import make_plan as make_plan
    from petra.settings import Numerics as Numerics
    from petra.settings import Runtime as Runtime
    from petra.specs import TensorSpec as TensorSpec
    from petra.update_rules import UpdateRules as UpdateRules

_SOURCE = Path(__file__).read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"^    from (petra\S*) import (\w+) as", _SOURCE, re.MULTILINE)}
"""Module of each public name: the imports above, which only type checkers execute."""
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
