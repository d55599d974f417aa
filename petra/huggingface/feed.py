"""Batches of a data loader, read in the process of the first stage, as messages of one form for all stages.

A microbatch is one tensor of bytes: what the first block reads, then a header and all that the loss reads. The first block passes
the header and what follows on as a side tensor (:class:`Entry`), and the loss finds the batch as the collator made it
(:meth:`Form.unpack`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import skip_first_batches
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding

from petra.errors import DataError, invalid, require
from petra.huggingface.absent import Absent
from petra.huggingface.inputs import FIELDS, stack
from petra.specs import Streams, TensorSpec, as_streams
from petra.torch_private import version_counter

Batch = Mapping[str, Tensor]
HEADER, ALIGNMENT = 2048, 64
"""Bytes of a header, and of which tensors in a message begin at a multiple."""
IMAGES = "pixel_values"
"""Field of images, the only one of their inputs."""
UNREAD = (IMAGES, "a loss and callbacks that read no images, unless compute_loss or prediction_step is your own", "one that does")
"""For the error of images that have not travelled."""


@dataclass(frozen=True)
class Form:
    """Form of a microbatch.

    Attributes:
        rows: Number of rows.
        fields: Names of the inputs of the first block: of :data:`petra.huggingface.inputs.FIELDS`, or :data:`IMAGES`.
        size: Number of tokens of a row, to which shorter ones are padded. None for images.
        shape, dtype: Shape and type of the inputs of the first block.
        others: Bytes of the entries that only the loss reads.
        whole: Whether the loss gets images, too; it gets stand-ins otherwise. It always gets tokens.
        masked: Whether the mask of padding is made here, for models without one in their batches.
        vocabulary: Number of tokens that the model knows; None for images.
    """

    rows: int
    fields: tuple[str, ...]
    size: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    others: int
    whole: bool
    masked: bool = False
    vocabulary: int | None = None

    @staticmethod
    def of(batch: Any, size: int | None, vocabulary: int | None, *, whole: bool, bidirectional: bool) -> Form:
        """Return the form in which a batch fits, as do batches with fewer or shorter rows.

        Args:
            batch: The longest batch.
            size: Number of tokens of a row; None: those of the batch.
            vocabulary: As in :class:`Form`.
            whole: As in :class:`Form`.
            bidirectional: Whether tokens attend to those after them, so that padding needs a mask.

        Raises:
            DataError: If it has no inputs, or other things than tensors.
        """
        names = sorted(batch) if isinstance(batch, Mapping) else [type(batch).__name__]
        expected = f"one with {FIELDS[0]} or {IMAGES}, and tensors only"
        require(bool({FIELDS[0], IMAGES} & {*names}), "batch", expected, ", ".join(names), DataError)
        for name, value in batch.items():
            require(isinstance(value, Tensor), f"batch, {name}", "a tensor", type(value).__name__, DataError)
        if IMAGES in batch:
            images = batch[IMAGES]
            rest = sum(_aligned(t.nbytes) for name, t in batch.items() if name != IMAGES)
            return Form(len(images), (IMAGES,), None, tuple(images.shape), images.dtype, rest, whole)
        rows, found = batch[FIELDS[0]].shape[0], batch[FIELDS[0]].shape[-1]
        size = found if size is None else size
        require(found <= size, "max_length", f"at least {found}, the tokens of a row", size, DataError)
        masked = bidirectional and "attention_mask" not in batch
        fields = tuple(name for name in FIELDS if name in batch or (masked and name == "attention_mask"))
        # Entries that grow with the tokens of a row, such as labels, may be as long as the inputs.
        grown = -(-size // max(found, 1))
        rest = sum(_aligned(t.nbytes * (grown if t.dim() > 1 else 1)) for name, t in batch.items() if name not in FIELDS)
        shape = (rows, len(fields), size) if len(fields) > 1 else (rows, size)
        return Form(rows, fields, size, shape, torch.int32, rest, whole, masked, vocabulary)

    def joined(self, others: Sequence[Form]) -> Form:
        """Return the form with the rows of this one in which the batches of all forms fit."""
        every = [self, *others]
        fields = {form.fields for form in every}
        expected = f"the same entries in all data: {', '.join(self.fields)}"
        require(len(fields) == 1, "batch", expected, " and ".join(", ".join(each) for each in sorted(fields)), DataError)
        if self.size is None:
            return replace(self, others=max(form.others for form in every))
        size = max(form.size or 0 for form in every)
        rest = max(form.others * -(-self.rows // form.rows) * -(-size // (form.size or 1)) for form in every)
        return replace(self, size=size, shape=(*self.shape[:-1], size), others=rest)

    @property
    def inputs(self) -> TensorSpec:
        """Spec of the inputs of the first block."""
        return TensorSpec(self.shape, self.dtype)

    @property
    def start(self) -> int:
        """Where the header begins."""
        return _aligned(self.inputs.bytes)

    @property
    def passed(self) -> int:
        """Where the part begins that travels to the last stage."""
        return 0 if self.whole or self.size is not None else self.start

    def spec_of(self, replicas: int = 1) -> TensorSpec:
        """Return the spec of a microbatch of all replicas."""
        return TensorSpec((replicas * (self.start + HEADER + self.others),), torch.uint8)

    def split(self, batch: Batch) -> list[Batch]:
        """Return the parts of a batch that fit into a microbatch each."""
        names = batch if isinstance(batch, Mapping) else {}
        main = IMAGES if self.size is None else FIELDS[0]
        require(main in names, "batch", f"one with {main}", ", ".join(sorted(names)) or type(batch).__name__, DataError)
        total = len(batch[main])
        if total <= self.rows:
            return [batch]
        parts: list[Batch] = []
        for begin in range(0, total, self.rows):
            own = {name: t for name, t in batch.items() if begin == 0 or _has_rows(t, total)}
            part = {name: t[begin : begin + self.rows] if _has_rows(t, total) else t for name, t in own.items()}
            parts.append(BatchEncoding(part) if isinstance(batch, BatchEncoding) else part)
        return parts

    def pack(self, batch: Batch, **facts: Any) -> Tensor:
        """Return a microbatch.

        Args:
            batch: A part that :meth:`split` has returned.
            facts: Numbers for the loss.

        Raises:
            DataError: If the batch does not fit the form.
        """
        packed = torch.zeros(self.spec_of().shape, dtype=torch.uint8)
        inputs = self._inputs(batch)
        missing = self.rows - len(inputs)
        inputs = inputs if not missing else torch.cat([inputs, inputs[-1:].expand(missing, *inputs.shape[1:])])
        packed[: self.inputs.bytes].view(self.dtype).view(self.shape).copy_(inputs)
        listed, place = [], self.start + HEADER
        own = {IMAGES} if self.size is None else {*self.fields} & {*batch}
        for name, value in batch.items():
            begin = None if name in own else place
            listed.append((name, str(value.dtype).removeprefix("torch."), list(value.shape), begin))
            if begin is None:
                continue
            place += _aligned(value.nbytes)
            require(place <= len(packed), f"batch, {name}", "at most as many bytes as in the first batches", "more", DataError)
            packed[begin : begin + value.nbytes] = value.contiguous().view(-1).view(torch.uint8)
        header = json.dumps({"entries": listed, "encoding": isinstance(batch, BatchEncoding), **facts}).encode()
        require(len(header) <= HEADER, "batch", "fewer entries", f"{len(listed)}", DataError)
        packed[self.start : self.start + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return packed

    def unpack(self, side: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the part of a batch that :meth:`pack` was given, from what has travelled, and the facts."""
        start, shift = self.start - self.passed, self.passed
        facts: dict[str, Any] = json.loads(side[start : start + HEADER].cpu().numpy().tobytes().rstrip(b"\0"))
        batch: dict[str, Tensor] = {}
        for name, kind, shape, begin in facts.pop("entries"):
            dtype: torch.dtype = getattr(torch, kind)
            if begin is not None:
                spec = TensorSpec(tuple(shape), dtype)
                batch[name] = side[begin - shift : begin - shift + spec.bytes].clone().view(dtype).view(spec.shape)
            elif shift:  # images that have not travelled
                batch[name] = Absent.of(shape, dtype, side.device, UNREAD)
            else:
                inputs = side[: self.inputs.bytes].view(self.dtype).view(self.shape)[: shape[0]]
                one = inputs[:, self.fields.index(name)] if inputs.dim() == 3 and self.size else inputs
                batch[name] = (one[:, : shape[1]] if self.size else one).to(dtype, copy=True)
        return BatchEncoding(batch) if facts.pop("encoding") else batch, facts

    def _inputs(self, batch: Batch) -> Tensor:
        if self.size is None:
            images = batch[IMAGES]
            expected = TensorSpec(self.shape[1:], self.dtype)
            expected.require(images[0], f"batch, a row of {IMAGES}")
            return images
        length = batch[FIELDS[0]].shape[-1]
        require(length <= self.size, "max_length", f"at least {length}, the tokens of a row", self.size, DataError)
        check_tokens(f"batch, {FIELDS[0]}", batch[FIELDS[0]], self.vocabulary)
        if self.masked and "attention_mask" not in batch:
            batch = {**batch, "attention_mask": torch.ones_like(batch[FIELDS[0]])}
        return stack(batch, self.fields, self.size)


def versions(batch: Batch) -> dict[str, tuple[Tensor, int | None]]:
    """Return the tensors of a batch, with the numbers of their changes, for :func:`is_unchanged`."""
    return {name: (t, version_counter(t)) for name, t in batch.items()}


def is_unchanged(batch: Batch, before: Mapping[str, tuple[Tensor, int | None]]) -> bool:
    """Return whether a batch has the tensors that it had, and none has changed."""
    return batch.keys() == before.keys() and all(batch[n] is t and version_counter(t) == i for n, (t, i) in before.items())


class Entry(nn.Module):
    """First block: takes a microbatch as bytes, and passes on what the loss reads.

    Args:
        block: First block of the model.
        form: Form of the microbatch.
    """

    def __init__(self, block: nn.Module, form: Form) -> None:
        super().__init__()
        self.block, self.form = block, form

    def forward(self, packed: Tensor) -> Streams:
        form = self.form
        inputs = packed[: form.inputs.bytes].view(form.dtype).view(form.shape)
        hidden = as_streams(self.block(inputs if form.size is None else inputs.long()))
        return (*hidden, packed[form.passed :].clone())


class Exit(nn.Module):
    """Last block: returns its outputs, and what the loss reads."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *side: Tensor) -> Streams:
        return (*as_streams(self.block(hidden, *side[:-1])), side[-1])


def source_of(read: Callable[[int], Tensor], replicas: int = 1) -> Any:
    """Return a data source of the microbatches that ``read`` returns, one for each replica. The loss has the targets that travel,
    so a microbatch of a replica counts as one target of the source.
    """
    nothing = torch.zeros(replicas, dtype=torch.int64)
    return SimpleNamespace(inputs=read, targets=lambda m: nothing)


class Reader:
    """Reads the batches of a loader in order, epoch after epoch, in one process.

    As ``accelerate`` does, it reads one batch ahead, so that an evaluation draws the same random numbers. A resumed run reads the
    same batches with the same random numbers of the collator. The generators of Python, NumPy and torch, and those that are
    attributes of the collator, get the state at the start of the epoch before its order is drawn, then that before the batch that
    was read ahead, and that of the checkpoint.

    Args:
        loader: The data loader.
        collator: The collator.
        epoch: Number of the first epoch.
        states: What :meth:`states` has returned, to resume; None for a new run.
        of_replicas: Returns a value of all replicas, which draw the same order; by default, there are none.
    """

    def __init__(
        self,
        loader: Any,
        collator: Any,
        epoch: int = 0,
        states: Mapping[str, Any] | None = None,
        of_replicas: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> None:
        self.loader, self._collator, self._epoch, self._resumed = loader, collator, epoch - 1, states
        self._of_replicas, self._ahead = of_replicas, Ahead(loader, collator)
        self._batches: Iterator[Any] = iter(())
        self._next = list[Batch]()
        self._at, self._begin = -1, random_states(collator)

    def read(self, numbers: Sequence[int]) -> list[Batch]:
        """Return the batches of an epoch with consecutive numbers, fewer at its end. Number 0 begins the next epoch."""
        if not numbers:
            return []
        if numbers[0] == 0 or self._at < 0:
            self._start(numbers[0])
        found = [*self._next, *islice(self._batches, len(numbers) - len(self._next))]
        self._read_ahead()
        self._at = numbers[-1] + 1
        return found

    def _read_ahead(self) -> None:
        self._before = random_states(self._collator)
        self._next = list(islice(self._batches, int(hasattr(self.loader, "base_dataloader"))))

    def states(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"epoch": self._begin, "before": self._before, "now": random_states(self._collator)}

    def begin(self) -> Ahead:
        """Return the loader, to read the first batch ahead as :meth:`read` would. Sets the states of random numbers."""
        if self._resumed is not None:
            set_random_states(self._collator, self._resumed["now"])
        self._set_epoch(self.loader, self._epoch + 1)
        return self._ahead

    def _set_epoch(self, loader: Any, epoch: int) -> None:
        parts: list[Any] = [loader, getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _start(self, skip: int) -> None:
        self._epoch += 1
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_random_states(self._collator, resumed["epoch" if skip else "now"])
        self._begin = random_states(self._collator)
        self._set_epoch(self.loader, self._epoch)
        ahead, left = self._ahead, skip
        if skip and isinstance(self.loader, DataLoader) and not isinstance(self.loader.dataset, IterableDataset):
            ahead, left = Ahead(skip_first_batches(self.loader, skip), self._collator), 0
            self._set_epoch(ahead.loader, self._epoch)
        self._batches, self._next = iter(ahead), []
        own = torch.get_rng_state()
        first = self._of_replicas(own)[0]
        if not torch.equal(own, first):
            torch.set_rng_state(first)
            self._draw_order()
            torch.set_rng_state(own)
        if resumed is not None and skip:
            next(islice(self._batches, left - 1, None), None) if left else self._draw_order()
            set_random_states(self._collator, resumed.get("before", resumed["now"]))
            self._read_ahead()
            if "before" in resumed:  # older checkpoints are of readers that did not read ahead
                set_random_states(self._collator, resumed["now"])

    def _draw_order(self) -> None:
        """Let a sampler draw the order of the epoch, which it does with the first batch, now."""
        batches: Any = self._batches
        order: Any = getattr(batches, "_sampler_iter", None)
        if type(order).__name__ == "generator":
            batches._sampler_iter = chain([*islice(order, 1)], order)


class _Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(count())


def numbers(length: int | None) -> DataLoader[Any]:
    """Return a loader of the numbers of an epoch's batches, for the loop of ``Trainer``, that draws no random numbers of others."""
    data: Any = _Endless() if length is None else range(length)
    return DataLoader(data, batch_size=1, collate_fn=lambda found: found[0], generator=torch.Generator())


GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
}
"""How the state of a generator is read and set."""
NEW: dict[type, Callable[[Any], Any]] = {
    Tensor: lambda state: torch.Generator(),
    tuple: lambda state: random.Random(),
    dict: lambda state: np.random.Generator(getattr(np.random, state["bit_generator"])()),
}
"""How a generator is made for a state, by its type."""


def _access(value: object) -> Any:
    return next((both for kind, both in GENERATORS.items() if isinstance(value, kind)), None)


def random_states(owner: Any) -> dict[str, Any]:
    """Return the states of the generators that a collator, or a data set, may draw from; None for those that it may make later."""
    values = getattr(owner, "__dict__", {}).items()
    own = {name: both[0](value) if both else None for name, value in values if (both := _access(value)) or value is None}
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "own": own}


def set_random_states(owner: Any, states: Mapping[str, Any]) -> None:
    """Restore what :func:`random_states` has returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for name, state in states["own"].items():
        generator = getattr(owner, name, None)
        if state is None:
            if _access(generator):  # made since then
                setattr(owner, name, None)
            continue
        if generator is None and hasattr(owner, name):
            setattr(owner, name, generator := NEW[type(state)](state))
        if both := _access(generator):
            both[1](generator, state)


class Ahead:
    """A loader whose first batch may be read before its first iteration, which has it, too: a stream may not begin again.

    Attributes:
        states: Random numbers after that batch, from which the iteration goes on. None: it goes on from those of its start.
    """

    def __init__(self, loader: Any, collator: Any) -> None:
        self.loader, self._collator = loader, collator
        self._begun: Any = None
        self.states: Any = None

    def first(self) -> Any:
        """Return the first batch, or None if there is none."""
        batches = iter(self)
        batch = next(batches, None)
        self._begun = batches if batch is None else chain([batch], batches)
        self.states = random_states(self._collator)
        return batch

    def __iter__(self) -> Iterator[Any]:
        if self._begun is None:
            # not accelerate's own iteration, which reads ahead
            return iter(getattr(self.loader, "base_dataloader", self.loader))
        batches, self._begun = self._begun, None
        if self.states is not None:
            set_random_states(self._collator, self.states)
        return batches  # type: ignore[no-any-return]


def is_indexed(loader: Any) -> bool:
    """Return whether the rows of a loader's data set can be read in any order."""
    data = getattr(loader, "dataset", None)
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def begins_again(loader: Any) -> bool:
    """Return whether every iteration over a loader has its first rows, as far as its data set shows it."""
    return is_indexed(loader) or type(getattr(loader, "dataset", None)).__module__.startswith("datasets.")


def longest_batch(ahead: Ahead, rows: int, vocabulary: int | None, *, known: bool = False) -> Any:
    """Return a batch of the longest rows of a data set, made by the collator of its loader; its first batch if it can't be indexed.

    Every row is read for it: 100,000 rows of 512 tokens take 0.5 s as tensors in memory, and 26 s of ``datasets``. Where the
    collator makes the tokens, from texts or the columns of pairs, it gets each row.

    Args:
        known: Whether the largest length is known, so that any batch will do, and only the first rows are read.

    Raises:
        DataError: If the data set has no rows, or a row has tokens beyond the vocabulary.
    """
    loader = ahead.loader
    if not is_indexed(loader):
        batch = ahead.first()
        require(batch is not None, "train_dataset", "rows", "none", DataError)
        return batch
    states = random_states(loader.dataset)
    batch = _longest(loader, rows, vocabulary, known=known)
    set_random_states(loader.dataset, states)
    return batch


def _longest(loader: Any, rows: int, vocabulary: int | None, *, known: bool) -> Any:
    data = loader.dataset
    require(len(data) > 0, "data", "a data set with a length > 0", "no rows", DataError)
    collate, first = loader.collate_fn, data[0]
    own = isinstance(first, Mapping) and FIELDS[0] in first
    if known or not own:
        batch = collate([data[i] for i in range(min(rows, len(data)))])
        if known or not isinstance(batch, Mapping) or FIELDS[0] not in batch:
            return batch
    lengths = []
    for i in range(len(data)):
        tokens = torch.as_tensor((data[i] if own else collate([data[i]]))[FIELDS[0]])
        lengths.append(tokens.shape[-1] if tokens.dim() else 1)
        check_tokens(f"row {i}", tokens, vocabulary)
    chosen = sorted(range(len(data)), key=lambda i: -lengths[i])[:rows]
    return collate([data[i] for i in chosen])


def check_tokens(name: str, tokens: Tensor, vocabulary: int | None) -> None:
    """Check that tokens are in the vocabulary of a model. Types that are no integers are refused elsewhere."""
    if vocabulary is not None and tokens.numel() and not tokens.is_floating_point() and int(tokens.max()) >= vocabulary:
        raise invalid(name, f"tokens below {vocabulary}, the vocabulary of the model", int(tokens.max()), DataError)


def _has_rows(t: Tensor, rows: int) -> bool:
    return t.dim() > 0 and len(t) == rows


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
