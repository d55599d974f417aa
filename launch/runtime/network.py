"""Environment variables of NCCL, gloo and torch."""

from __future__ import annotations

import os
from pathlib import Path

from petra.errors import invalid

DEFAULTS = {
    "NCCL_DEBUG": "WARN",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Variables that every run sets: NCCL's warnings, and a dump of the last 2000 operations if one exceeds ``trainer.timeout``."""
DUMPS = "TORCH_FR_DUMP_TEMP_FILE"


def set_variables() -> None:
    """Set the variables that the environment lacks. Call it before the process group is made.

    Raises:
        ConfigError: If the folder for dumps can't be created.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if DUMPS in os.environ:
        folder = Path(os.environ[DUMPS]).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise invalid(DUMPS, "a folder that can be created", f"{folder} ({error.strerror})") from error
