"""An embedding and a head that share their weights stay equal where gradients are exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer

from petra import METHODS, ConfigError
from petra.engine.options.outer_step import OuterStep
from petra.huggingface import PetraTrainer
from petra.plan.timetable import Op, training_rounds
from tests.huggingface.models import as_torchrun, batch_of, tiny
from tests.huggingface.test_trainer import arguments, rows
from tests.support.processes import run_processes

LLAMA = "LlamaForCausalLM"
SETTINGS: dict[str, Any] = {"max_steps": 50, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0}


def trained(kind: type, folder: Path, optim: str, **others: Any) -> tuple[Any, dict[str, Tensor]]:
    args = arguments(folder, **SETTINGS, max_grad_norm=0.5, optim=optim)
    trainer = kind(tiny(LLAMA, tied=True), args, train_dataset=rows(16), **others)
    trainer.train()
    return trainer, {key: value.clone() for key, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(("optim", "tolerance", "method"), [("sgd", 1e-12, "1f1b"), ("adamw_torch", 1e-9, "gpipe")])
def test_training_equals_that_of_trainer(optim: str, tolerance: float, method: str, tmp_path: Path) -> None:
    _, expected = trained(Trainer, tmp_path / "plain", optim)
    trainer, found = trained(PetraTrainer, tmp_path / "piped", optim, stages=4, method=method)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.tie_word_embeddings
    assert again.lm_head.weight is again.model.embed_tokens.weight
    inputs = batch_of(LLAMA, 1)[0]
    torch.testing.assert_close(again(**inputs).logits, trainer.model.eval()(**inputs).logits)


def resumed(rank: int | None, folder: str) -> dict[str, Tensor]:
    """Return the weights of 4 updates, of which the last 2 are trained after a resume; without clipping and without a delay."""
    if rank is not None:
        as_torchrun(rank, 2)
    settings = {**SETTINGS, "max_steps": 4, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    args = arguments(Path(folder), **settings, **({} if rank is None else {"ddp_backend": "gloo"}))
    named = {"train_dataset": rows(16), "stages": 3, "method": "backprop"}
    PetraTrainer(tiny(LLAMA, tied=True), args, **named).train()
    trainer = PetraTrainer(tiny(LLAMA, tied=True), args, **named)
    trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return {key: value.clone() for key, value in trainer.model.state_dict().items()}


@pytest.mark.processes
def test_processes_have_the_same_weights_after_a_resume(tmp_path: Path) -> None:
    alone = resumed(None, str(tmp_path / "alone"))
    args = arguments(tmp_path / "plain", **{**SETTINGS, "max_steps": 4, "max_grad_norm": 0.0})
    trainer = Trainer(tiny(LLAMA, tied=True), args, train_dataset=rows(16))
    trainer.train()
    for key, value in trainer.model.state_dict().items():
        torch.testing.assert_close(alone[key], value, rtol=1e-9, atol=1e-9)
    for found in run_processes(2, resumed, tmp_path / "processes", str(tmp_path / "two"), timeout=200):
        assert all(torch.equal(found[key], value) for key, value in alone.items())
        assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_a_tied_head_that_is_trained_apart_is_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny(LLAMA, torch.float32, tied=True)
    settings = {**SETTINGS, "max_steps": 4}
    trainer = PetraTrainer(model, arguments(tmp_path, **settings), train_dataset=rows(16), stages=4, method="dsp")
    trainer.train()
    assert "embedding and head shared weights, and are trained apart" in capfd.readouterr().err
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not torch.equal(again.lm_head.weight, again.model.embed_tokens.weight)
    inputs = batch_of(LLAMA, 1)[0]
    torch.testing.assert_close(again(**inputs).logits, trainer.model.eval()(**inputs).logits)


@pytest.mark.parametrize(
    ("outer", "line"),
    [
        (OuterStep(2, staggered=True), "outer.staggered: expected false with an embedding and a head that share their weights"),
        (OuterStep(2, format="int8"), "outer.format: expected null or bf16 with an embedding and a head that share their"),
        (OuterStep(60), "outer.every [+] outer.overlap: expected at most 50, the updates of the run"),
    ],
)
def test_outer_steps_that_would_part_the_weights_or_never_act_are_refused(outer: OuterStep, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=line):
        trained(PetraTrainer, tmp_path, "sgd", stages=4, method="1f1b", extensions=[outer])


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "backprop", "reversible"])
@pytest.mark.parametrize(("stages", "k"), [(2, 1), (3, 4), (5, 2)])
def test_gradients_are_added_up_when_no_message_is_in_flight(method: str, stages: int, k: int) -> None:
    chosen = METHODS[method]
    between, delays = chosen.boundary_delays(stages - 1), chosen.delays(stages, k)
    done = {(op, j): -1 for op in Op for j in range(stages)}
    sums = 0
    for shift, steps in training_rounds(delays, between, 0, 3 * k, k if chosen.flush else None):
        completed = None
        for step in steps:
            done[step.op, step.stage] = step.microbatch + shift
            completed = step.microbatch + shift if step.stage == 0 and step.op is Op.BACKWARD else completed
        if completed is not None and (completed + 1) % k == 0:
            assert {done[op, j] for op in (Op.FORWARD, Op.BACKWARD) for j in range(stages)} <= {completed}
            sums += 1
    assert sums == 3


def test_each_class_resumes_from_checkpoints_of_the_other(tmp_path: Path) -> None:
    """The file of the optimizer has one state for both weights, as that of ``Trainer``, whose FLOPs are counted."""
    named: dict[type, dict[str, Any]] = {Trainer: {}, PetraTrainer: {"stages": 3}}
    settings = {**SETTINGS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    found = []
    for first, second in ((Trainer, PetraTrainer), (PetraTrainer, Trainer)):
        args = arguments(tmp_path / first.__name__, **settings)
        before = first(tiny(LLAMA, tied=True), args, train_dataset=rows(16), **named[first])
        before.train()
        after = second(tiny(LLAMA, tied=True), args, train_dataset=rows(16), **named[second])
        after.train(resume_from_checkpoint=str(tmp_path / first.__name__ / "checkpoint-2"))
        found += [(each.model.state_dict(), each.state.total_flos) for each in (before, after)]
    weights, flops = found[0]
    for others, count in found[1:]:
        assert count == flops
        for key, value in weights.items():
            torch.testing.assert_close(others[key], value, rtol=1e-9, atol=1e-9)


def test_a_second_trainer_of_a_model_keeps_its_weights_tied(tmp_path: Path) -> None:
    """The first one has given embedding and head weights of their own."""
    found = []
    for kind, others in ((Trainer, {}), (PetraTrainer, {"stages": 2})):
        model, args = tiny(LLAMA, tied=True), arguments(tmp_path / kind.__name__, **{**SETTINGS, "max_steps": 2})
        for _ in range(2):
            trainer: Any = kind(model, args, train_dataset=rows(16), **others)
            trainer.train()
        trainer.save_model(tmp_path / kind.__name__)
        found.append((trainer.model.state_dict(), {*load_file(tmp_path / kind.__name__ / "model.safetensors")}))
    (expected, names), (weights, written) = found
    assert written == names
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-9)
