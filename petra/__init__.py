"""petra: train deep networks split over a line of workers with PETRA, and with the methods it is compared with."""

from petra.engine.endpoints import Losses
from petra.engine.totals import Result
from petra.engine.update_rules import UpdateRules
from petra.errors import ConfigError, DataError, ModelError, NumericsError, PetraError, ScheduleError
from petra.method import METHODS, Keep, Method, Weights
from petra.model import BlockSpec, Model
from petra.pipeline import Pipeline
from petra.settings import Numerics, Runtime
from petra.specs import TensorSpec

__all__ = [
    "METHODS",
    "BlockSpec",
    "ConfigError",
    "DataError",
    "Keep",
    "Losses",
    "Method",
    "Model",
    "ModelError",
    "Numerics",
    "NumericsError",
    "PetraError",
    "Pipeline",
    "Result",
    "Runtime",
    "ScheduleError",
    "TensorSpec",
    "UpdateRules",
    "Weights",
]
