"""Data sets, and streams of microbatches that depend on nothing but a seed and a number."""

from petra.data.dataset import Dataset, Split
from petra.data.load import DATASETS, load_dataset, microbatch_form, settings
from petra.data.streams import EvalStream, TrainStream

__all__ = ["DATASETS", "Dataset", "EvalStream", "Split", "TrainStream", "load_dataset", "microbatch_form", "settings"]
