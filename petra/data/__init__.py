"""Data sets in memory, and streams of microbatches that depend on nothing but a seed and a number."""

from petra.data.dataset import ArrayDataset
from petra.data.load import DATASETS, load_dataset
from petra.data.streams import EvalStream, TrainStream

__all__ = ["DATASETS", "ArrayDataset", "EvalStream", "TrainStream", "load_dataset"]
