"""Train deep networks in parallel with PETRA, an asynchronous pipeline of reversible blocks, and with related pipeline methods.

A :class:`Model` is a sequence of blocks. A :class:`Pipeline` assigns the blocks to stages, runs the stages in one or several
processes, and trains them with a :class:`Method`.

Each name is imported on first use, so that the command line does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from petra.engine.endpoints import Losses
    from petra.engine.recipe import Recipe
    from petra.engine.totals import Result
    from petra.engine.update_rules import UpdateRules
    from petra.errors import ConfigError, DataError, ModelError, NumericsError, PetraError, ScheduleError
    from petra.hooks import Hook
    from petra.method import METHODS, Keep, Method, Weights
    from petra.model import BlockSpec, Model
    from petra.pipeline import Pipeline
    from petra.plan import Plan, make_plan
    from petra.settings import Numerics, Runtime
    from petra.specs import TensorSpec

__all__ = [
    "METHODS",
    "BlockSpec",
    "ConfigError",
    "DataError",
    "Hook",
    "Keep",
    "Losses",
    "Method",
    "Model",
    "ModelError",
    "Numerics",
    "NumericsError",
    "PetraError",
    "Pipeline",
    "Plan",
    "Recipe",
    "Result",
    "Runtime",
    "ScheduleError",
    "TensorSpec",
    "UpdateRules",
    "Weights",
    "make_plan",
]

_MODULES = {
    "Losses": "petra.engine.endpoints",
    "Recipe": "petra.engine.recipe",
    "Result": "petra.engine.totals",
    "UpdateRules": "petra.engine.update_rules",
    "ConfigError": "petra.errors",
    "DataError": "petra.errors",
    "ModelError": "petra.errors",
    "NumericsError": "petra.errors",
    "PetraError": "petra.errors",
    "ScheduleError": "petra.errors",
    "Hook": "petra.hooks",
    "METHODS": "petra.method",
    "Keep": "petra.method",
    "Method": "petra.method",
    "Weights": "petra.method",
    "BlockSpec": "petra.model",
    "Model": "petra.model",
    "Pipeline": "petra.pipeline",
    "Plan": "petra.plan",
    "make_plan": "petra.plan",
    "Numerics": "petra.settings",
    "Runtime": "petra.settings",
    "TensorSpec": "petra.specs",
}
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
