"""Training runs: optimizers, learning rates, epochs, progress, records, checkpoints and export."""

from petra.diagnostics.process_memory import peak_memory
from petra.training.checkpoint import Checkpoints, best_of, facts_of, network, newest, restore
from petra.training.learning_rate import Cosine, MultiStep, Polynomial, Schedule, peak_rate
from petra.training.loggers import JsonLines, WandbLogger
from petra.training.optim import OPTIMIZERS, sgd
from petra.training.progress import Lines
from petra.training.records import locked, new_run_folder, read_rows, write_json
from petra.training.trainer import Row, Trainer, limited, means
from petra.training.watchers import Logger, UpdateMeans, Watcher
from petra.training.weight_files import FORMATS, export, facts_in, gathered_blocks, load, load_into

__all__ = [
    "FORMATS",
    "OPTIMIZERS",
    "Checkpoints",
    "Cosine",
    "JsonLines",
    "Lines",
    "Logger",
    "MultiStep",
    "Polynomial",
    "Row",
    "Schedule",
    "Trainer",
    "UpdateMeans",
    "WandbLogger",
    "Watcher",
    "best_of",
    "export",
    "facts_in",
    "facts_of",
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
    "read_rows",
    "restore",
    "sgd",
    "write_json",
]
