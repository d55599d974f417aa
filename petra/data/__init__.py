"""Data sets, and data sources that return microbatches by number."""

from petra.data.dataset import Dataset, Split
from petra.data.load import DATASETS, DECODED, in_memory, load_dataset, microbatch_form, settings
from petra.data.map_style import from_dataset
from petra.data.preparation import Preparation
from petra.data.sources import EvalSource, TrainSource

__all__ = [
    "DATASETS",
    "DECODED",
    "Dataset",
    "EvalSource",
    "Preparation",
    "Split",
    "TrainSource",
    "from_dataset",
    "in_memory",
    "load_dataset",
    "microbatch_form",
    "settings",
]
