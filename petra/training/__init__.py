"""Training runs: optimizers, learning rates, epochs, progress, records, checkpoints and export."""

from petra.process_memory import peak_memory
from petra.training.checkpoint import Checkpoints, best_of, facts_of, newest, restore
from petra.training.export import FORMATS, export, gathered_blocks, load, load_into
from petra.training.lars import LARS
from petra.training.learning_rate import SCHEDULES, Cosine, MultiStep, Polynomial, Schedule, peak_rate
from petra.training.lock import locked
from petra.training.optim import OPTIMIZERS, sgd
from petra.training.progress import Bar, Lines, Progress
from petra.training.records import JsonLines, Logger, TensorBoardLogger, WandbLogger, new_run_folder, write_json
from petra.training.state import network
from petra.training.trainer import Epoch, Trainer, finished_epochs, limited, means

__all__ = [
    "FORMATS",
    "LARS",
    "OPTIMIZERS",
    "SCHEDULES",
    "Bar",
    "Checkpoints",
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
    "best_of",
    "export",
    "facts_of",
    "finished_epochs",
    "gathered_blocks",
    "limited",
    "load",
    "load_into",
    "locked",
    "means",
    "network",
    "new_run_folder",
    "newest",
    "peak_memory",
    "peak_rate",
    "restore",
    "sgd",
    "write_json",
]
