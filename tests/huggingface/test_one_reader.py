"""One process reads the data of ``PetraTrainer``, and its results do not depend on the number of processes."""

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from petra.huggingface import PetraTrainer
from petra.huggingface.feed import Reader
from tests.huggingface.models import as_torchrun, tiny
from tests.huggingface.test_trainer import arguments, losses, rows
from tests.support.processes import run_processes

SETTINGS = {"gradient_accumulation_steps": 2, "max_steps": 4, "per_device_eval_batch_size": 6, "remove_unused_columns": False}
SETTINGS |= {"include_num_input_tokens_seen": "all"}


def masked(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Hide tokens at random; the marks of three generators must be the same in inputs and labels."""
    ids = torch.stack([row["input_ids"] for row in batch])
    hidden = (torch.rand(ids.shape) < 0.2) | torch.from_numpy(np.random.rand(*ids.shape) < 0.2)
    hidden[0, random.randrange(ids.shape[1])] = True
    return {
        "input_ids": ids.masked_fill(hidden, 1),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(~hidden, -100),
    }


class Reads(TrainerCallback):
    """Reads a weight of the model at each evaluation, and lets the other process ask for a checkpoint."""

    found: list[float]

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        self.found.append(float(sum(p.detach().double().sum() for p in model.parameters())))
        control.should_save = state.global_step == 2 and os.environ.get("RANK", "0") == str(
            int(os.environ.get("WORLD_SIZE", "1")) - 1
        )


def collecting(base: Any) -> Any:
    """Return a subclass that adds what it collects in ``compute_loss`` to the logs, and logs there."""

    class Collects(base):  # type: ignore[misc]
        found: list[float]

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
            if torch.is_grad_enabled():
                self.found.append(float((outputs["logits"].argmax(-1) == inputs["labels"]).double().mean()))
                self.log({"last": self.found[-1]})
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: dict[str, float], *args: Any) -> None:
            if "loss" in logs and self.found:
                logs["hits"] = sum(self.found) / len(self.found)
                self.found.clear()
            super().log(logs, *args)

    return Collects


def hits(trainer: Any) -> list[float]:
    return [row["hits"] for row in trainer.state.log_history if "loss" in row]


def trained(rank: int, folder: str, world: int) -> tuple[Any, ...]:
    if world > 1:
        as_torchrun(rank, world)
        multiprocessing.set_start_method("fork", force=True)  # of workers of loaders; a fork server would import all anew
    data = rows(20) if rank == 0 else rows(20)[::-1]  # never read
    args = arguments(Path(folder) / str(world), **SETTINGS, eval_strategy="steps", eval_steps=2, dataloader_num_workers=world - 1)
    reads = Reads()
    reads.found = []
    named = {"data_collator": masked, "compute_metrics": metrics, "callbacks": [reads]}
    model = tiny("BertForMaskedLM", torch.float32)
    trainer = collecting(PetraTrainer)(model, args, train_dataset=data, eval_dataset=data[:7], stages=2, **named)
    trainer.found = []
    torch.manual_seed(7 + rank)
    np.random.seed(7 + rank)
    random.seed(7 + rank)
    trainer.train()
    if rank == 0:
        torch.rand(1)
        trainer.save_model()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    scores = [row["eval_hits"] for row in trainer.state.log_history if "eval_hits" in row]
    checkpoints = sorted(path.name for path in (Path(folder) / str(world)).glob("checkpoint-*"))
    assert "train_loss" not in trainer.evaluate()
    predicted = trainer.predict(data[:5]).predictions.shape, trainer.state.num_input_tokens_seen, trainer.state.total_flos
    assert world == 1 or all("last" in row for row in trainer.state.log_history if "loss" in row)
    logged = hits(trainer)
    return losses(trainer), scores, reads.found, weights, checkpoints, predicted, logged


def metrics(prediction: Any) -> dict[str, float]:
    assert prediction.predictions.shape[:2] == prediction.label_ids.shape
    return {"hits": float((prediction.predictions.argmax(-1) == prediction.label_ids).sum())}


def test_masks_and_labels_agree_and_draws_are_those_of_trainer(tmp_path: Path) -> None:
    one = trained(0, str(tmp_path), 1)
    args = arguments(tmp_path / "plain", **SETTINGS, eval_strategy="steps", eval_steps=2)
    plain = collecting(Trainer)(
        tiny("BertForMaskedLM", torch.float32), args, train_dataset=rows(20), eval_dataset=rows(20)[:7], data_collator=masked
    )
    plain.found = []
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    plain.train()
    assert one[5][1] == plain.state.num_input_tokens_seen > 0
    assert one[5][2] == plain.state.total_flos > 0
    assert one[6] == hits(plain)
    assert [loss for loss, *_ in one[0]] == pytest.approx([loss for loss, *_ in losses(plain)], rel=1e-5)


@pytest.mark.processes
def test_two_processes_with_other_seeds_and_data_equal_one(tmp_path: Path) -> None:
    found = run_processes(2, trained, tmp_path, str(tmp_path), 2, timeout=120)
    for part in (0, 1, 2, 4, 5, 6):
        assert found[0][part] == found[1][part], part
    assert found[0][4] == ["checkpoint-2"]  # the last process has asked for it
    assert len({*found[0][2]}) == 2
    for key, value in found[0][3].items():
        assert torch.equal(found[1][3][key], value), key


class Slow(PetraTrainer):
    """Writes a model late."""

    def _save(self, *args: Any, **named: Any) -> None:
        time.sleep(0.5)
        super()._save(*args, **named)


def best(rank: int, folder: str) -> list[tuple[Any, ...]]:
    as_torchrun(rank, 2)
    found = []
    for strategy in ("steps", "best"):
        settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": strategy, "save_steps": 2}
        settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        args = arguments(Path(folder) / strategy, **SETTINGS, **settings)
        model = tiny("LlamaForCausalLM", torch.float32)
        trainer = Slow(model, args, train_dataset=rows(20), eval_dataset=rows(20)[:7], stages=2)
        trainer.train()
        weights = float(sum(p.detach().double().sum() for p in model.parameters()))
        found.append((trainer.state.best_model_checkpoint, weights, trainer.evaluate()["eval_loss"] == trainer.state.best_metric))
    return found


@pytest.mark.processes
def test_all_processes_load_the_best_model(tmp_path: Path) -> None:
    first, last = run_processes(2, best, tmp_path, str(tmp_path), timeout=120)
    assert first == last
    for strategy, (path, _, equal) in zip(("steps", "best"), first, strict=True):
        assert (path, equal) == (str(tmp_path / strategy / "checkpoint-4"), True)


@pytest.mark.parametrize("older", [False, True])
def test_a_reader_goes_on_with_the_same_random_numbers(older: bool) -> None:
    """In older checkpoints, the state is that before the next batch, since none was read ahead."""
    loader = prepare_data_loader(DataLoader(range(8), batch_size=1, collate_fn=collate_noise))  # type: ignore[arg-type]
    reader = Reader(loader, collate_noise)
    reader.read(range(3))
    states = reader.states()
    expected = reader.read(range(3, 6))
    if older:
        states = {"epoch": states["epoch"], "now": states["before"]}
    torch.manual_seed(9)
    assert Reader(loader, collate_noise, states=states).read(range(3, 6)) == expected


def collate_noise(rows: list[int]) -> tuple[int, float]:
    return rows[0], torch.rand(()).item()
