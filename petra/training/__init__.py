"""Training runs: optimizer, learning rate, epochs, progress, records and their folder, export."""

from petra.training.export import FORMATS, export, gathered_blocks, load, load_into
from petra.training.lars import LARS
from petra.training.learning_rate import SCHEDULES, Cosine, MultiStep, Polynomial, Schedule, peak_rate
from petra.training.memory import peak_memory
from petra.training.optim import OPTIMIZERS, sgd
from petra.training.progress import Bar, Lines, Progress
from petra.training.records import JsonLines, Logger, TensorBoardLogger, WandbLogger, new_run_folder, write_json
from petra.training.trainer import Epoch, Trainer, limited, means

__all__ = [
    "FORMATS",
    "LARS",
    "OPTIMIZERS",
    "SCHEDULES",
    "Bar",
    "Cosine",
    "Epoch",
    "JsonLines",
    "Lines",
    "Logger",
    "MultiStep",
    "Polynomial",
    "Progress",
    "Schedule",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
    "export",
    "gathered_blocks",
    "limited",
    "load",
    "load_into",
    "means",
    "new_run_folder",
    "peak_memory",
    "peak_rate",
    "sgd",
    "write_json",
]
