"""Train deep networks in parallel with PETRA, an asynchronous pipeline of reversible blocks, and with related pipeline methods.

A :class:`Model` is a sequence of blocks. A :class:`Pipeline` assigns the blocks to stages, runs the stages in one or several
processes, and trains them with a :class:`Method`.
"""

from petra.engine.endpoints import Losses
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
    "Result",
    "Runtime",
    "ScheduleError",
    "TensorSpec",
    "UpdateRules",
    "Weights",
    "make_plan",
]
