"""Training runs: optimizer, learning rate, epochs, progress, records and their folder."""

from petra.training.learning_rate import Schedule, peak_rate
from petra.training.memory import peak_memory
from petra.training.optim import sgd
from petra.training.progress import Bar, Lines, Progress
from petra.training.records import JsonLines, Logger, WandbLogger, new_run_folder, write_json
from petra.training.trainer import Epoch, Trainer

__all__ = [
    "Bar",
    "Epoch",
    "JsonLines",
    "Lines",
    "Logger",
    "Progress",
    "Schedule",
    "Trainer",
    "WandbLogger",
    "new_run_folder",
    "peak_memory",
    "peak_rate",
    "sgd",
    "write_json",
]
