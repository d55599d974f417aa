"""``PetraTrainer`` against ``transformers.Trainer`` with the same arguments, in one process and through torchrun."""

import difflib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from petra import ConfigError, DataError, PetraError
from petra.huggingface import PetraTrainer
from petra.staleness import WeightPrediction
from tests.huggingface.models import VOCABULARY, tiny
from tests.structure import ROOT
from tests.support.processes import PIPES, environment

EXAMPLE = ROOT / "examples/huggingface.py"
EVENTS = ("train_begin", "epoch_begin", "step_end", "log", "evaluate", "save", "epoch_end", "train_end")


def rows(count: int, *, padded: bool = False, classes: int | None = None) -> list[dict[str, Any]]:
    """Return rows of text with different numbers of targets; with attention masks and different lengths if ``padded``."""
    found, generator = [], torch.Generator().manual_seed(count)
    for i in range(count):
        tokens = torch.randint(1, VOCABULARY, (12 - i % 3 * 2 if padded else 12,), generator=generator) // 2 + 1
        labels = tokens.clone()
        labels[: i % 7] = -100
        row = {"input_ids": tokens, "labels": labels if classes is None else i % classes}
        found.append({**row, "attention_mask": torch.ones_like(tokens)} if padded else row)
    return found


def padding(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate rows of different lengths, padded to the longest."""
    fields = {name: [row[name] for row in batch] for name in ("input_ids", "attention_mask")}
    padded = {name: torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for name, each in fields.items()}
    return {**padded, "labels": torch.tensor([row["labels"] for row in batch])}


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    """Return arguments with which nothing is as it is by default, and 18 batches are no multiple of 4."""
    common = {"use_cpu": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 50, "seed": 3}
    schedule = {"learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 5, "weight_decay": 0.1, "max_grad_norm": 0.5}
    logs = {"logging_steps": 1, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    return TrainingArguments(str(folder), **{**common, **schedule, **logs, **settings})


def losses(trainer: Any) -> list[tuple[float, float, float, int]]:
    return [(row["loss"], row["learning_rate"], row["epoch"], row["step"]) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForSequenceClassification"])
def test_losses_are_those_of_trainer_step_by_step(kind: str, tmp_path: Path) -> None:
    """With the loss of an update averaged over its targets; padded, with smoothed labels, over its batches."""
    text = kind == "LlamaForCausalLM"
    changed = {} if text else {"optim": "sgd", "label_smoothing_factor": 0.1, "lr_scheduler_type": "linear", "max_steps": 12}
    data = {"train_dataset": rows(70) if text else rows(70, padded=True, classes=3)}
    data |= {} if text else {"data_collator": padding}
    found = []
    runs = [{"stages": 3}, {"method": "gpipe", "loss_rows": 7}]
    for trainer, settings in (
        (Trainer, {}),
        *((PetraTrainer, each) for each in (runs if text else [{"stages": [2, 2], "method": "backprop", "max_length": 12}])),
    ):
        each = trainer(tiny(kind, torch.float32), arguments(tmp_path, **changed), **data, **settings)
        each.train()
        found.append(losses(each))
    assert len(found[0]) == (50 if text else 12)
    for own in found[1:]:
        torch.testing.assert_close(torch.tensor(own), torch.tensor(found[0]), rtol=1e-4, atol=0)


class Recorder(TrainerCallback):
    """Records events with the number of the step, and what is logged."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.removeprefix("on_") not in EVENTS:
            return super().__getattribute__(name)
        return lambda args, state, control, **others: self.events.append((name, state.global_step))


def test_events_evaluation_saving_and_resuming(tmp_path: Path) -> None:
    """Events are Trainer's; a run that resumes ends as one that was not interrupted; transformers loads what was saved."""
    settings = {"max_steps": 12, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 7, "save_total_limit": 1}
    data, found, model = {"train_dataset": rows(70), "eval_dataset": rows(10)}, [], None
    for kind in (Trainer, PetraTrainer):
        recorder = Recorder()
        args = arguments(tmp_path / kind.__name__, **settings)
        trainer = kind(tiny("LlamaForCausalLM", torch.float32, tied=kind is PetraTrainer), args, callbacks=[recorder], **data)
        trainer.train()
        found.append(recorder.events)
    assert found[0] == found[1]
    assert {name for name, _ in found[1]} == {f"on_{name}" for name in EVENTS}
    assert [path.name for path in (tmp_path / "PetraTrainer").iterdir()] == ["checkpoint-12"]

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "PetraTrainer/checkpoint-12")
    assert model.config.tie_word_embeddings
    plain = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=1), eval_dataset=[data["eval_dataset"][0]])
    mine = trainer.evaluate([data["eval_dataset"][0]])
    assert mine["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    assert {"eval_a_loss", "eval_b_loss"} <= trainer.evaluate({"a": rows(8), "b": rows(9)}).keys()

    args = arguments(tmp_path / "resumed", **{**settings, "save_total_limit": None})
    fresh = PetraTrainer(tiny("LlamaForCausalLM", torch.float32, tied=True), args, method="dsp", stages=2, **data)
    fresh.train()
    again = PetraTrainer(tiny("LlamaForCausalLM", torch.float32), args, method="dsp", stages=2, **data)
    again.train(resume_from_checkpoint=str(tmp_path / "resumed/checkpoint-7"))
    assert losses(again) == losses(fresh)
    for method, count, message in (("1f1b", 4, "method: expected dsp"), ("dsp", 2, "per_device_train_batch_size: expected 4")):
        other = arguments(tmp_path, **settings, per_device_train_batch_size=count)
        changed = PetraTrainer(tiny("LlamaForCausalLM", torch.float32), other, method=method, stages=2, **data)
        with pytest.raises(ConfigError, match=message):
            changed.train(resume_from_checkpoint=str(tmp_path / "resumed/checkpoint-7"))
    torch.testing.assert_close(again.pipeline.state_dict(), fresh.pipeline.state_dict(), rtol=0, atol=0)


def test_a_run_resumes_with_its_extensions_only(tmp_path: Path) -> None:
    """Checkpoints that tell none resume with any, as before."""
    older = type("Older", (PetraTrainer,), {"_facts": property(lambda self: {"method": "dsp"})})

    def trained(folder: str, resumed: str | None, extensions: Any, kind: type = PetraTrainer) -> Any:
        args = arguments(tmp_path / folder, max_steps=3, save_strategy="steps", save_steps=2)
        made = {"method": "dsp", "stages": 2, "extensions": extensions}
        trainer = kind(tiny("LlamaForCausalLM", torch.float32), args, train_dataset=rows(16), **made)
        trainer.train(resume_from_checkpoint=None if resumed is None else str(tmp_path / resumed / "checkpoint-2"))
        return losses(trainer)

    prediction = WeightPrediction("difference")
    whole = trained("whole", None, [prediction])
    assert trained("again", "whole", [prediction]) == whole
    for others, got in (([], "none"), ([WeightPrediction("difference", 2.0)], ".*horizon=2.0.")):
        with pytest.raises(ConfigError, match=rf"^extensions: expected WeightPrediction\(.*\), as in .*, got {got}$"):
            trained("again", "whole", others)
    trained("older", None, [prediction], older)
    assert trained("again", "older", [prediction])


def test_what_cannot_be_mapped_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one message, which the processes of torchrun print once. Clipping by stage is said in one line."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    model, data = tiny("LlamaForCausalLM", torch.float32), rows(8)
    args = arguments(tmp_path, torch_compile=True, optim="galore_adamw", neftune_noise_alpha=5.0)
    with pytest.raises(ConfigError) as refused:
        PetraTrainer(model, args, train_dataset=data)
    assert str(refused.value).endswith(
        "got torch_compile=True, torch_compile_backend=inductor, neftune_noise_alpha=5.0, optim=galore_adamw"
    )
    capsys.readouterr()
    for error in (refused.value, refused.value, KeyError("own")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == f"error: {refused.value}\nKeyError: 'own'\n"
    trainer = PetraTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=data, method="petra", stages=2)
    assert trainer.pipeline.plan.k == 4
    assert capsys.readouterr().out == "max_grad_norm=0.5 of each stage: with petra they update apart\n"
    with pytest.raises(ConfigError, match=r"num_train_epochs: expected a number > 0, .*: there would be no update, got 0"):
        PetraTrainer(model, arguments(tmp_path, max_steps=-1, num_train_epochs=0), train_dataset=data, stages=2).train()
    trainer.state.train_batch_size = 4
    trainer.state.save_to_json(str(tmp_path / "trainer_state.json"))
    model.save_pretrained(tmp_path)
    with pytest.raises(PetraError, match="resume_from_checkpoint: expected a folder that PetraTrainer has saved"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    for change, settings, found in (
        (lambda row: row, {"max_length": 8}, "max_length: expected at least 12, the tokens of a row, got 8"),
        (lambda row: row, {"max_length": 0}, "max_length: expected at least 12, the tokens of a row, got 0"),
        (
            lambda row: {"labels": row["labels"]},
            {},
            "batch: expected one with input_ids or pixel_values, .* got labels",
        ),
        (lambda row: {**row, "input_ids": row["input_ids"] / 2}, {}, "batch: expected integers .* as input_ids, got torch"),
        (lambda row: row, {"data_collator": list}, "batch: expected one with input_ids .*, got list"),
    ):
        with pytest.raises(DataError, match=found):
            PetraTrainer(model, arguments(tmp_path), train_dataset=[change(row) for row in data], **settings).train()
    with pytest.raises(PetraError, match="model: expected a model of transformers, got Linear"):
        PetraTrainer(torch.nn.Linear(2, 2), arguments(tmp_path), train_dataset=data)


def test_the_page_of_arguments_is_up_to_date() -> None:
    from docs.trainer_arguments import page

    assert page() == (ROOT / "docs/trainer_arguments.md").read_text(encoding="utf-8")


def run(*command: str | Path, folder: Path) -> None:
    """Run a Python command with a limit, and end its processes with it."""
    settings = {**PIPES, "stderr": subprocess.STDOUT, "env": environment(), "cwd": folder, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *map(str, command)], **settings)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output


@pytest.mark.processes
def test_a_script_for_trainer_runs_over_two_processes_with_ten_changed_lines(tmp_path: Path) -> None:
    """The example, and the same for ``Trainer``: equal losses, an evaluation and a checkpoint each."""
    example = EXAMPLE.read_text(encoding="utf-8")
    plain = example.replace("from petra.huggingface import PetraTrainer", "from transformers import Trainer")
    plain = plain.replace("PetraTrainer(", "Trainer(").replace("        method=own.method,\n", "")
    changed = [line for line in difflib.ndiff(plain.splitlines(), example.splitlines()) if line.startswith("+ ")]
    assert 0 < len(changed) <= 10
    (tmp_path / "plain.py").write_text(plain, encoding="utf-8")
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 60, encoding="utf-8")
    options = "--use_cpu True --text text.txt --max_steps 12 --logging_steps 1 --gradient_accumulation_steps 4 --block_size 32"
    options += " --per_device_train_batch_size 2 --per_device_eval_batch_size 8 --eval_strategy steps --eval_steps 6 --save_steps 6"
    options += " --learning_rate 1e-2 --report_to none --disable_tqdm True --output_dir"
    run("plain.py", *options.split(), "plain", folder=tmp_path)
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE, *options.split(), "two", folder=tmp_path)
    histories = [json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("plain", "two")]
    for key in ("loss", "eval_loss", "learning_rate"):
        first, second = ([row[key] for row in history if key in row] for history in histories)
        assert second == pytest.approx(first, rel=1e-4)
    assert {"checkpoint-6", "checkpoint-12", "model.safetensors"} <= {path.name for path in (tmp_path / "two").iterdir()}
    transformers.AutoConfig.from_pretrained(tmp_path / "two")
