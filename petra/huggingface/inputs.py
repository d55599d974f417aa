"""Batches of ``transformers`` as one tensor of integers, and the context of tokens that travels between stages.

The *context* of a token is 0 for padding, 1 for a token, and 2 for the first token of a document. Masks of attention and positions
follow from it in every stage, so that a message has one byte per token, as a side tensor, instead of a mask, positions and rotary
tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from petra.errors import DataError, alternatives, invalid, require
from petra.specs import IGNORED

FIELDS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""Fields of a batch that :func:`stack` accepts, in the order of the rows."""
PADDING, TOKEN, FIRST = 0, 1, 2
"""Contexts of a token."""


def stack(batch: Mapping[str, Tensor], fields: Sequence[str] = FIELDS[:1], size: int | None = None) -> Tensor:
    """Return a batch as the inputs of a model that :func:`petra.huggingface.from_pretrained` has made with the same ``fields``.

    Args:
        batch: Integers (B, T) by field, as a tokenizer or a data collator of ``transformers`` returns them. Entries that are no
            inputs, such as ``labels``, are ignored.
        fields: Fields in the order of :data:`FIELDS`.
        size: Number of tokens to which rows are padded at their ends; None: they are left as they are. Needs the field
            ``attention_mask``, unless the model is causal and the targets of padding are -100.

    Returns:
        int64 (B, T) if there is one field, otherwise (B, fields, T).

    Raises:
        DataError: If a field is missing, the batch has one that is not among ``fields``, ``input_ids`` are no integers, rows are
            longer than ``size``, ``attention_mask`` is not 0 or 1, or ``position_ids`` do not count up from 0 in every document.
    """
    for name in FIELDS:
        got = f"one with {name}" if name in batch else f"one without {name}"
        require((name in batch) == (name in fields), "batch", f"one with {alternatives(fields)} (fields)", got, DataError)
    ids = torch.as_tensor(batch[FIELDS[0]])
    fits = not ids.is_floating_point() and ids.dim() == 2
    require(fits, "batch", f"integers (B, T) as {FIELDS[0]}", f"{ids.dtype}{[*ids.shape]}", DataError)
    for name in fields[1:]:
        shape = torch.as_tensor(batch[name]).shape
        require(shape == ids.shape, "batch", f"integers {[*ids.shape]} as {name}, one for each token", f"{[*shape]}", DataError)
    rows = torch.stack([torch.as_tensor(batch[name]).long() for name in fields], dim=1)
    if "position_ids" in fields:
        found = rows[:, fields.index("position_ids")]
        expected = "0, 1, 2, … with a restart at 0 for every document"
        require(torch.equal(positions(torch.where(found == 0, FIRST, TOKEN)), found), "position_ids", expected, "others", DataError)
    if "attention_mask" in fields and not {*torch.as_tensor(batch["attention_mask"]).flatten().tolist()} <= {0, 1}:
        raise invalid("attention_mask", "0 for padding and 1 for tokens", "others", DataError)
    if size is not None:
        require(rows.shape[2] <= size, "batch", f"rows of at most {size} tokens", f"{rows.shape[2]}", DataError)
        rows = F.pad(rows, (0, size - rows.shape[2]))
    return rows if len(fields) > 1 else rows[:, 0]


def next_tokens(labels: Tensor, size: int | None = None) -> Tensor:
    """Return the targets (B·T,) of a causal language model: the label of the next token for every token; -100 for the last one.

    Args:
        labels: Labels (B, T) as ``transformers`` has them: those of the tokens themselves, -100 where nothing is to be predicted.
        size: As for :func:`stack`.
    """
    require(labels.dim() == 2, "labels", "labels (B, T)", f"a tensor of {labels.dim()} dimensions", DataError)
    return F.pad(labels[:, 1:], (0, (size or labels.shape[1]) + 1 - labels.shape[1]), value=IGNORED).flatten()


def context_of(rows: Mapping[str, Tensor], delimiter: int | None) -> Tensor | None:
    """Return the context (B, T) of the tokens, or None if every row is one document without padding.

    Args:
        rows: Integers (B, T) by field.
        delimiter: Token with which every document begins, or None.
    """
    context = None
    if "position_ids" in rows:
        context = torch.where(rows["position_ids"] == 0, FIRST, TOKEN)
    elif delimiter is not None:
        context = torch.where(rows["input_ids"] == delimiter, FIRST, TOKEN)
    if "attention_mask" in rows:
        context = rows["attention_mask"] * (TOKEN if context is None else context)
    return context


def positions(context: Tensor) -> Tensor:
    """Return the position (B, T) of each token in its document."""
    index = torch.arange(context.shape[1], device=context.device)
    first: Tensor = torch.where(context == FIRST, index, 0).cummax(1).values
    return index - first


def attention_mask(context: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Return the mask of attention: true (B, 1, T, T) where position i may attend to position j.

    Args:
        context: Context (B, T) of the tokens.
        causal: Whether i attends only to j <= i.
        window: Largest number of tokens that i attends to, itself included; None: all.
    """
    document = (context == FIRST).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :]) & (context != PADDING)[:, None, :]
    mask = mask.tril() if causal else mask
    return (mask if window is None else mask.triu(1 - window))[:, None]


def row_names(fields: Sequence[str]) -> tuple[str, ...]:
    """Check names of fields, and return them in the order of :data:`FIELDS`.

    Raises:
        ConfigError: If one is unknown, ``input_ids`` is missing, or both ``attention_mask`` and ``position_ids`` are there, with
            which ``transformers`` would let documents see each other.
    """
    known = all(name in FIELDS for name in fields) and FIELDS[0] in fields
    require(known, "fields", f"{FIELDS[0]}, and any of {', '.join(FIELDS[1:])}", ", ".join(fields))
    if {"attention_mask", "position_ids"} <= set(fields):
        raise invalid("fields", "attention_mask (padding) or position_ids (packed documents)", "both")
    return tuple(name for name in FIELDS if name in fields)
