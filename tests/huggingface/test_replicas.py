"""Replicas of a pipeline read rows, and have losses, as the processes of ``Trainer`` under DDP."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from petra import PetraError
from petra.huggingface import PetraTrainer
from tests.huggingface.models import LENGTH, VOCABULARY, as_torchrun, tiny
from tests.huggingface.test_trainer import arguments
from tests.support.processes import run_processes

SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 8, "max_grad_norm": 0.5}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2, "warmup_steps": 0}
KEYS = ("grad_norm", "eval_loss", "eval_sum", "total_flos")

seen: list[Any] = []


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows with different numbers of tokens and labels."""
    generator, found = torch.Generator().manual_seed(1), []
    for i in range(count):
        tokens = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        found.append({"input_ids": tokens, "labels": torch.where(torch.arange(LENGTH) < i * 5 % 11, -100, tokens)})
    return found


def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the loss in float64; transformers computes and logs it in float32. Record it with the tokens' labels."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    found = nn.functional.cross_entropy(logits, targets, reduction="sum") / count
    seen.append((float(found.detach()), labels.tolist(), torch.is_grad_enabled()))
    return found


def trained(rank: int, folder: str, world: int, methods: tuple[str, ...]) -> list[Any]:
    as_torchrun(rank, world)
    found = []
    for method in methods:
        args = arguments(Path(folder) / f"{world}{method}", **SETTINGS, **EVALUATION, ddp_backend="gloo", logging_steps=1)
        named = {"train_dataset": rows(22), "eval_dataset": rows(7), "compute_metrics": metrics, "compute_loss_func": loss}
        model = tiny("LlamaForCausalLM")
        if method == "ddp":
            trainer: Any = Trainer(model, args, **named)
        else:
            trainer = PetraTrainer(model, args, method=method, stages=2, dp=2, **named)
            torch.manual_seed(3 + rank // (world // 2))  # all replicas draw the order of the first
        seen.clear()
        trainer.train()
        log = [row[key] for row in trainer.state.log_history for key in KEYS if key in row]
        found.append((log, [*seen], {key: value.clone() for key, value in model.state_dict().items()}))
    return found


def evaluated(rank: int, folder: str) -> list[Any]:
    """Return losses of ``Trainer`` under DDP, and of replicas with a loss in chunks, which read the order of ``data_seed``."""
    as_torchrun(rank, 2)
    found = []
    for kind, others in ((Trainer, {}), (PetraTrainer, {"stages": 2, "dp": 2, "loss_rows": 7})):
        args = arguments(
            Path(folder), **{**SETTINGS, "max_steps": 3}, per_device_eval_batch_size=2, ddp_backend="gloo", data_seed=11
        )
        trainer: Any = kind(tiny("LlamaForCausalLM"), args, train_dataset=rows(22), eval_dataset=rows(7), **others)
        trainer.train()
        if kind is PetraTrainer:
            with pytest.raises(PetraError, match=r"got save_on_each_node=True in several processes$"):
                kind(tiny("LlamaForCausalLM"), dataclasses.replace(args, save_on_each_node=True), **others)
        mean = trainer.accelerator.reduce({"rank": torch.tensor(float(rank))}, "mean")
        padded = trainer.accelerator.pad_across_processes(torch.ones(2, 2 + rank), dim=1, pad_index=7, pad_first=True)
        found.append(
            [
                float(mean["rank"]),
                *padded.flatten().tolist(),
                trainer.evaluate()["eval_loss"],
                *(row["loss"] for row in trainer.state.log_history if "loss" in row),
            ]
        )
    return found


@pytest.mark.processes
def test_losses_in_chunks_and_the_order_of_data_seed_are_those_of_trainer_under_ddp(tmp_path: Path) -> None:
    for expected, found in run_processes(2, evaluated, tmp_path, str(tmp_path), timeout=120):
        assert found == pytest.approx(expected, rel=1e-6)


def metrics(prediction: Any) -> dict[str, float]:
    assert prediction.predictions.shape[:2] == (7, LENGTH)
    return {"sum": float((prediction.predictions * (prediction.label_ids != -100)[..., None]).sum())}


@pytest.mark.processes
def test_replicas_have_the_rows_and_losses_of_trainer_under_ddp(tmp_path: Path) -> None:
    found = run_processes(2, trained, tmp_path, str(tmp_path), 2, ("ddp", "1f1b"), timeout=200)
    for (log, own, weights), (log2, own2, weights2) in found:
        assert log2 == pytest.approx(log, rel=1e-12)
        assert [each[1:] for each in own2] == [each[1:] for each in own]
        assert [each[0] for each in own2] == pytest.approx([each[0] for each in own], rel=1e-12)
        for key, value in weights.items():
            torch.testing.assert_close(weights2[key], value, rtol=1e-11, atol=1e-12)
    log, _, weights = found[0][1]
    for apart, late in run_processes(4, trained, tmp_path / "4", str(tmp_path), 4, ("1f1b", "dsp"), timeout=200):
        assert apart[0] == log
        assert all(torch.equal(apart[2][key], value) for key, value in weights.items())
        assert len(late[0]) == len([each for each in log]) - 8  # no gradient norms
        assert late[0][-1] == log[-1]  # FLOPs
