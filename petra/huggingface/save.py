"""Trained weights as a checkpoint of ``transformers``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from petra.errors import ModelError, first_line, require
from petra.huggingface.inputs import FIELDS
from petra.huggingface.load import adapted, base_of, loaded, quiet
from petra.huggingface.split import split

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja", "spiece.model")
"""Files of a checkpoint that are copied, so that the new one has the tokenizer of the old one."""


def save_pretrained(source: str | Path | Any, state: Mapping[str, Tensor], folder: str | Path, lora: int | None = None) -> None:
    """Write trained weights as a checkpoint that ``from_pretrained`` of ``transformers`` loads.

    Embedding and head are written apart, with ``tie_word_embeddings=false``. Adapters are added to the weights that they adapt.
    Layers with a coupling are written without it.

    Args:
        source: What :func:`petra.huggingface.from_pretrained` was given: a folder, whose tokenizer is copied, or a model, which
            gets the weights.
        state: Weights of the whole network by ``<block>.<name>``, in its shapes (:meth:`petra.Pipeline.state_dict` of all ranks).
        folder: Folder of the new checkpoint, new or empty.
        lora: Rank of the adapters of :func:`petra.huggingface.load.huggingface`, or None.

    Raises:
        ConfigError: If ``folder`` has files, or ``source`` can't be read.
        ModelError: If the weights are those of another model.
    """
    out = Path(folder)
    require(not (out.exists() and any(out.iterdir())), str(out), "a new or empty folder", "one with files")
    named = isinstance(source, str | Path)
    whole: Any = loaded(source) if named else source
    whole = whole if lora is None else adapted(whole, lora)
    model = base_of(whole)
    untie(model)
    blocks, given = split(model, FIELDS[:1], None), {key.partition(".")[0] for key in state}
    require(given == blocks.keys(), "state", f"weights of the blocks {', '.join(blocks)}", ", ".join(sorted(given)), ModelError)
    for name, block in blocks.items():
        own = {key.removeprefix(f"{name}."): t for key, t in state.items() if key.startswith(f"{name}.")}
        own = {key.removeprefix("f.").removeprefix("block."): t for key, t in own.items()}  # of a coupling
        block.to(next(iter(own.values())).dtype)
        try:
            block.load_state_dict(own)
        except RuntimeError as error:
            raise ModelError(f"block {name} does not fit {type(model).__name__} ({first_line(error)})") from error
    model.config.dtype = next(model.parameters()).dtype
    with quiet(out):
        (whole.merge_and_unload() if whole is not model else model).save_pretrained(out)
    for file in (file for pattern in TOKENIZER for file in Path(source).glob(pattern)) if named else ():
        shutil.copyfile(file, out / file.name)


def untie(model: Any) -> int:
    """Give the head weights of its own, record it in the model's configuration, and return how many parameters this adds."""
    require(hasattr(model, "get_input_embeddings"), "model", "a model of transformers", type(model).__name__, ModelError)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if tied:
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    if getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False
    return head.weight.numel() if tied else 0
