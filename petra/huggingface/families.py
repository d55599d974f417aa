"""Decoders of ``transformers`` that are accepted, by the command :data:`COMMAND`, and why other classes are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("families.json")
COMMAND = "python -m petra.huggingface.check"
PLAN = ("embed_tokens", "layers", "norm")
"""Modules in the ``base_model_pp_plan`` of a decoder."""
_found: dict[str, Any] = json.loads(FILE.read_text())
DECODERS: tuple[str, ...] = tuple(_found["accepted"])
"""Classes that have passed the check."""
REFUSED: dict[str, str] = _found["refused"]
"""Why others have not."""
VERSION: str = _found["transformers"]
"""Version of ``transformers`` that was checked."""
_ROBERTA = "its positions are counted from its padding token, and rows are padded with token 0"
_DISTIL = "its head is of several modules, and its loss reads between them"
_TWO = "of an encoder and a decoder, every layer of which reads the encoder's output"
OTHERS = {
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "DistilBertForMaskedLM": _DISTIL,
    "DistilBertForSequenceClassification": _DISTIL,
    "T5ForConditionalGeneration": _TWO,
    "BartForConditionalGeneration": _TWO,
    "AlbertForMaskedLM": "its layers share their weights",
}
"""Why classes that are no such decoders are refused."""
