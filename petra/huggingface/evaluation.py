"""Evaluation of a ``Trainer`` with a pipeline: its own loop runs on the last stage, on what the pipeline has answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, has_length

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.errors import ModelError, require
from petra.huggingface.building import Pipelined, not_empty
from petra.huggingface.feed import Ahead, source_of
from petra.huggingface.load import base_of
from petra.huggingface.losses import share_of
from petra.huggingface.outputs import answering
from petra.huggingface.replaced import replaced


class Evaluating(Pipelined):
    """Base class of :class:`petra.huggingface.PetraTrainer`: evaluation and prediction."""

    control: Any
    is_in_train: bool
    _left: int
    _metrics_only = False

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        """Evaluate as ``Trainer`` does, and return the metrics."""
        self._metrics_only = True
        try:
            return super().evaluate(*arguments, **named)
        finally:
            self._metrics_only = False

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate as ``Trainer`` does, on the last stage. The first process reads the data. All return the same metrics."""
        drained = not (self.is_in_train and self._left)
        require(
            drained, "evaluate", "control.should_evaluate where the pipeline is not drained", "a call in a callback", ModelError
        )
        metrics_only, self._metrics_only = self._metrics_only, False  # callbacks may ask for predictions
        reading = self._ahead(dataloader)
        if not self.is_in_train:
            self._fit(reading)
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        require(self._loss_rows is None or only, "loss_rows", "None where logits are asked for", self._loss_rows)
        config = base_of(self.model).config
        extra = [name for name in ("output_hidden_states", "output_attentions") if getattr(config, name, False) and not only]
        require(not extra, "model.config", "one that asks for logits alone in predictions", ", ".join(extra), ModelError)
        length, examples, size = all_gather_objects(_facts_of(dataloader))[0]
        sized = self.dp == 1 or length is not None
        require(sized, "eval_dataset", "data with a length, where there are replicas", "a stream", ModelError)
        self._total = length, size, 0 if not size or examples is None else examples % size
        answers = self._answers(reading, only, ignore_keys)
        self.callback_handler.eval_dataloader = dataloader
        output = None
        self._step: Any = self.prediction_step
        if self.rank == self._last:
            with replaced(self, prediction_step=lambda *others, **named: self._answered.popleft()):
                loop = super().evaluation_loop
                output = loop(_Loader(answers, length, examples), description, prediction_loss_only, ignore_keys, metric_key_prefix)
        else:
            self.model.eval()  # as the loop does
            for _ in answers:
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        if output is not None and metrics_only:
            output = output._replace(predictions=None, label_ids=None)
        self._remainder, self._logs_of_all = None, description != "Prediction"  # evaluate logs next
        return all_gather_objects(output)[self._last]

    def _answers(self, loader: Ahead, only: bool, ignore_keys: Any) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of a data loader on the last stage, after what it has answered; in others, as many empty ones."""
        self._answered, self._batches = deque[Any](), deque[dict[str, Tensor]]()
        self._waiting: list[tuple[dict[str, Tensor], Tensor]] = []
        self._asked = only, ignore_keys
        batches = iter(loader) if self.reads else iter(())
        done, at_once = 0, (8 if only else 1) * len(self.pipeline.plan.stages)
        while True:
            packed, count = list[Tensor](), 0
            with raise_on_all_ranks():
                for batch in batches:
                    parts = self.form.split(batch)
                    packed += [self.form.pack(part, part=i, parts=len(parts)) for i, part in enumerate(parts)]
                    count += 1
                    if len(packed) >= at_once:
                        break
            microbatches, count = self._same("eval_dataset", (len(packed), count))
            if not count:
                return
            self.pipeline.evaluate(source_of(packed.__getitem__, self.dp), microbatches)
            for _ in range(count):
                done += 1
                batch = self._batches.popleft() if self.rank == self._last else {}
                length, size, remainder = self._total
                # Losses count once for each row: accelerate divides the last batch so, which any may be without a length.
                self._remainder = (remainder or None) if done == length else None
                if length is None and size:
                    self._remainder = find_batch_size(batch)
                yield batch

    def _evaluation(self, found: Tensor, side: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Answer a batch, once all of its parts have arrived."""
        batch, facts, logits = self.outputs_of(found, side)
        self.keep_part(batch, facts, logits)
        return torch.zeros((), device=logits.device)

    def keep_part(self, batch: dict[str, Tensor], facts: Mapping[str, Any], found: Tensor) -> None:
        """Keep a part of a batch with its logits, or the sum and the number (1, 2) of its losses, and answer a whole batch."""
        self._waiting.append((batch, found))
        if facts["part"] < facts["parts"] - 1:
            return
        (first, _), *rest = self._waiting
        names = {name for part, _ in rest for name in part}
        parts = {name: [part[name] for part, _ in self._waiting if name in part] for name in first}
        whole = type(first)({name: torch.cat(each) if name in names else each[0] for name, each in parts.items()})
        joined, self._waiting = torch.cat([each for _, each in self._waiting]), []
        self._batches.append(dict(whole))
        only, ignore_keys = self._asked
        if self._loss_rows is not None:
            total, count = joined.sum(0)
            items = self._get_num_items_in_batch([whole], joined.device)
            self._answered.append((total / count * share_of(self, count, items), None, None))
            return
        with answering(base_of(self.model), whole, joined, () if self._of_states else None, self._autocast):
            self._answered.append(self._step(self.model, whole, only, ignore_keys=ignore_keys))

    def _fit(self, reading: Ahead) -> None:
        """Build the pipeline again, if the data of a loader do not fit its microbatches. Every process must call this method."""
        with raise_on_all_ranks():
            own = self._pipeline is not None and self.rank == 0 and not_empty(getattr(reading.loader, "dataset", None))
            fits = not own or self.form.joined([self._form(None, reading)]) == self.form
        if self._pipeline is None or not all_gather_objects(fits)[0]:
            self._build(None, reading if self.rank == 0 else None)


class _Loader:
    """Batches that have been answered, for the loop of ``Trainer``."""

    def __init__(self, answers: Iterator[Any], length: int | None, examples: int | None) -> None:
        self._answers, self._length = answers, length
        self.dataset = None if examples is None else range(examples)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._answers


def _facts_of(loader: Any) -> tuple[int | None, int | None, int | None]:
    """Return the numbers of batches and rows of a loader, and the rows of a batch if accelerate may cut the last one."""
    data: Any = getattr(loader, "dataset", None)
    cut = hasattr(loader, "base_dataloader") and not getattr(loader, "_drop_last", False)
    size = getattr(loader, "total_batch_size", None) if cut else None
    return len(loader) if has_length(loader) else None, len(data) if has_length(data) else None, size
