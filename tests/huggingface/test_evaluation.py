"""Evaluations and predictions of ``PetraTrainer`` against those of ``Trainer``: last batches, streams, and calls in callbacks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset, default_collate
from transformers import Trainer, TrainerCallback

from petra import PetraError
from petra.huggingface import PetraTrainer
from tests.huggingface.models import as_torchrun
from tests.huggingface.test_overrides import Run, llama
from tests.huggingface.test_trainer import rows
from tests.support.processes import run_processes


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows(10))


def metrics(found: Any) -> dict[str, float]:
    return {"rows": float(len(found.predictions)), "sum": float(np.abs(found.predictions).sum())}


def numbers(trainer: Any) -> list[float]:
    found = trainer.evaluate()
    return [found[key] for key in ("eval_loss", "eval_rows", "eval_sum") if key in found]


def a_last_batch_that_is_dropped(run: Run) -> Any:
    """One of two, and none of three batches."""
    settings = {"per_device_eval_batch_size": 4, "dataloader_drop_last": True}
    named = {"eval_dataset": rows(10), "compute_metrics": metrics}
    return [
        *numbers(run.make(llama(), named, **settings)),
        *numbers(run.make(llama(), {**named, "eval_dataset": rows(12)}, **settings)),
    ]


def the_last_batch_of_a_stream(run: Run) -> Any:
    named = {"eval_dataset": Stream(), "compute_metrics": metrics}
    trainer = run.make(llama(), named, per_device_eval_batch_size=8)
    return [*numbers(trainer), trainer.predict(Stream()).metrics["test_loss"]]


def a_stream_in_a_loader_of_ones_own(run: Run) -> Any:
    def get_eval_dataloader(self: Any, data: Any = None) -> Any:
        return DataLoader(Stream(), batch_size=8, collate_fn=lambda batch: default_collate(batch))

    return numbers(run.overriding(get_eval_dataloader=get_eval_dataloader).make(llama(), {"eval_dataset": Stream()}))


class Predicting(TrainerCallback):
    trainer: Any
    found: Any

    def on_evaluate(self, *others: Any, **named: Any) -> None:
        self.found = self.trainer.predict(rows(3)).predictions


def predictions_after_an_evaluation(run: Run) -> Any:
    callback = Predicting()
    callback.trainer = run.make(llama(), {"eval_dataset": rows(8), "callbacks": [callback]})
    return [callback.trainer.evaluate()["eval_loss"], *callback.found.flatten().tolist()]


SAME = [a_last_batch_that_is_dropped, the_last_batch_of_a_stream, a_stream_in_a_loader_of_ones_own, predictions_after_an_evaluation]


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.__name__)
def test_it_is_as_in_trainer(case: Callable[[Run], Any], tmp_path: Path) -> None:
    expected, found = (case(Run(kind, tmp_path)) for kind in (Trainer, PetraTrainer))
    assert found == pytest.approx(expected, rel=1e-5)


class Evaluating(TrainerCallback):
    trainer: Any

    def on_step_end(self, *others: Any, **named: Any) -> None:
        self.trainer.evaluate()


def test_an_evaluation_between_drains_is_refused(tmp_path: Path) -> None:
    callback = Evaluating()
    named = {"eval_dataset": rows(8), "callbacks": [callback]}
    callback.trainer = Run(PetraTrainer, tmp_path, method="petra").make(llama(), named)
    with pytest.raises(
        PetraError, match=r"^evaluate: expected control\.should_evaluate where the pipeline is not drained, got a call"
    ):
        callback.trainer.train()


def in_a_process(rank: int, folder: str) -> list[Any]:
    as_torchrun(rank, 2)
    trainer = Run(PetraTrainer, Path(folder)).make(llama(), {"eval_dataset": rows(8)}, max_steps=1)
    trainer.train()
    trainer.evaluate()
    replicas = Run(PetraTrainer, Path(folder), dp=2).make(llama(), {"eval_dataset": Stream()})
    with pytest.raises(PetraError, match=r"^eval_dataset: expected data with a length, where there are replicas, got a stream"):
        replicas.evaluate()
    return [module.training for module in trainer.model.modules()]


@pytest.mark.processes
def test_all_processes_leave_the_model_in_evaluation_and_replicas_refuse_streams(tmp_path: Path) -> None:
    for modes in run_processes(2, in_a_process, tmp_path, str(tmp_path), timeout=120):
        assert not any(modes)
