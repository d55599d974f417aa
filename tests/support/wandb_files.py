"""Reader of the files that Weights & Biases writes offline: blocks of the LevelDB log format that contain wandb's own messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32768
DEADLINE = 30.0
"""Seconds to wait for the end of a file."""
LAST_PARTS = (1, 4)
"""Types of the chunks with which a record ends: a whole record, or the last of several parts."""


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the content of each record. The file begins with 7 bytes, and each chunk too: checksum (4), length (2), type (1)."""
    content = path.read_bytes()
    at, parts = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:  # no room for another chunk in this block
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in LAST_PARTS:
            yield parts
            parts = b""


class OfflineRun:
    """Content of the only offline run in a run's folder.

    Attributes:
        id: Identity of the run.
        config: Configuration.
        rows: Logged values by step.
        summary: Final values.
    """

    def __init__(self, folder: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        (self.folder,) = (folder / "wandb").glob("offline-run-*")
        self.config: dict[str, Any] = {}
        self.rows: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        until = time.monotonic() + DEADLINE
        while True:  # wandb's own process writes the file, until a record of the run's end
            records = [Record.FromString(data) for path in self.folder.glob("*.wandb") for data in chunks(path)]
            if records and records[-1].HasField("exit"):
                break
            assert time.monotonic() < until, "the file has no end"
            time.sleep(0.05)
        for record in records:
            if record.HasField("run"):
                self.id = record.run.run_id
                self.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                merge(self.rows.setdefault(record.history.step.num, {}), record.history.item)
            merge(self.summary, record.summary.update)


def merge(values: dict[str, Any], items: Any) -> None:
    """Add the items of a message to a dictionary. An item has one key, or the keys of nested dictionaries."""
    for item in items:
        *outer, last = item.nested_key or [item.key]
        place = values
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = json.loads(item.value_json)
