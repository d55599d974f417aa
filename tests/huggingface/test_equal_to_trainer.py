"""What a script changes around ``PetraTrainer`` acts as it does around ``Trainer``, or is refused by name: never ignored."""

import copy
import functools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from petra import ConfigError, PetraError
from petra.huggingface import PetraTrainer, from_pretrained
from tests.huggingface.models import VOCABULARY, tiny
from tests.huggingface.test_trainer import arguments, losses, rows

LLAMA, BERT, VIT = "LlamaForCausalLM", "BertForSequenceClassification", "ViTForImageClassification"
SHORT = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0}


def both(
    folder: Path,
    model: Callable[[], Any],
    data: Any,
    after: Callable[[Any], object] = lambda t: None,
    *,
    kinds: Any = None,
    **settings: Any,
) -> list[Any]:
    """Train ``Trainer`` and ``PetraTrainer`` over two stages, and check that all logged losses are equal."""
    named = {key: settings.pop(key) for key in [*settings] if key in NAMED}
    found = []
    for kind, others in zip(kinds or (Trainer, PetraTrainer), ({}, {"stages": 2}), strict=True):
        args = arguments(folder / kind.__name__, **{**SHORT, **settings})
        trainer = kind(model(), args, train_dataset=data() if callable(data) else data, **others, **copy.deepcopy(named))
        after(trainer)
        trainer.train()
        found.append(trainer)
    first, second = ([row[key] for row in each.state.log_history for key in sorted(row) if key.endswith("loss")] for each in found)
    assert first
    assert second == pytest.approx(first, rel=1e-5)
    return found


NAMED = ("data_collator", "eval_dataset", "compute_metrics", "compute_loss_func", "callbacks", "preprocess_logits_for_metrics")


def overridden(name: str, function: Any) -> list[Any]:
    def kind(base: Any) -> Any:
        return type("Mine", (base,), {name: lambda self, *args, **named: function(getattr(base, name), self, *args, **named)})

    return [kind(Trainer), kind(PetraTrainer)]


def tenth(loss: Any, self: Any, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
    value, outputs = loss(self, model, inputs, return_outputs=True, **named)
    assert outputs["logits"].shape[:2] == inputs["input_ids"].shape
    return (value / 10, outputs) if return_outputs else value / 10


def of_sgd(create: Any, self: Any, *args: Any) -> Any:
    self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
    return self.optimizer


def llama() -> Any:
    return tiny(LLAMA, torch.float32)


@pytest.mark.parametrize(("name", "function"), [("compute_loss", tenth), ("create_optimizer", of_sgd)])
def test_overridden_methods_are_called(name: str, function: Any, tmp_path: Path) -> None:
    both(tmp_path, llama, rows(16), kinds=overridden(name, function), eval_strategy="epoch", eval_dataset=rows(6))


@pytest.mark.parametrize(
    "name", ["training_step", "_prepare_inputs", "get_batch_samples", "evaluation_loop", "create_optimizer_and_scheduler"]
)
def test_overridden_methods_that_are_not_called_are_refused(name: str, tmp_path: Path) -> None:
    kind = type("Mine", (PetraTrainer,), {name: lambda self, *args, **named: None})
    with pytest.raises(ConfigError, match=f"Mine: expected methods that a pipeline calls, .* got its own {name}"):
        kind(llama(), arguments(tmp_path), train_dataset=rows(8))


def wrapped() -> Any:
    model = llama()
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **named: Any) -> Any:
        found = inner(*args, **named)
        found["loss"] = found["loss"] / 10
        return found

    model.forward = forward
    return model


def replaced() -> Any:
    model = llama()
    inner = model.loss_function
    model.loss_function = lambda *args, **named: inner(*args, **named) / 10
    return model


@pytest.mark.parametrize("model", [wrapped, replaced])
def test_a_wrapped_forward_and_a_replaced_loss_function_act(model: Any, tmp_path: Path) -> None:
    both(tmp_path, model, rows(16))


def test_a_loss_function_and_what_is_set_after_the_constructor_act(tmp_path: Path) -> None:
    def half(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        shifted = outputs["logits"][:, :-1].flatten(0, 1)
        return 0.5 * nn.functional.cross_entropy(shifted, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    def change(trainer: Any) -> None:
        trainer.compute_loss_func = half
        for p in trainer.model.parameters():
            p.requires_grad_(p is trainer.model.lm_head.weight)
        nn.init.zeros_(trainer.model.lm_head.weight)

    both(tmp_path, llama, rows(16), change)


def refused(model: Any, tmp_path: Path, message: str, kind: Any = PetraTrainer) -> None:
    with pytest.raises(PetraError, match=message):
        kind(model, arguments(tmp_path, **SHORT), train_dataset=rows(16), stages=2).train()


def test_what_a_pipeline_would_not_call_is_refused(tmp_path: Path) -> None:
    hooked, changes, shared = llama(), llama(), llama()
    hooked.model.register_forward_hook(lambda *args: None)
    refused(hooked, tmp_path, "module model: expected none: .*, got hooks")
    inner = changes.forward
    changes.forward = lambda input_ids=None, **named: inner(input_ids=input_ids.clone(), **named)
    refused(changes, tmp_path, "input_ids in forward: expected the inputs of the batch")
    shared.model.layers[1].self_attn.q_proj = shared.model.layers[0].self_attn.q_proj
    adaptive = AdaLoraConfig(init_r=4, target_r=2, target_modules=["q_proj"], total_step=8, tinit=1, tfinal=2)
    refused(get_peft_model(llama(), adaptive), tmp_path, "model: expected adapters in layers, .*, got ADALORA")
    refused(shared, tmp_path, "layer1: expected layers with weights of their own")

    def twice(loss: Any, self: Any, model: Any, inputs: Any, **named: Any) -> Any:
        return loss(self, model, dict(inputs), **named) + loss(self, model, dict(inputs), **named)

    refused(llama(), tmp_path, "compute_loss: expected a loss that calls the model once", overridden("compute_loss", twice)[1])


def test_the_model_has_the_trained_weights(tmp_path: Path) -> None:
    plain, piped = both(tmp_path, lambda: get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"])), rows(16))
    for key, value in plain.model.state_dict().items():
        torch.testing.assert_close(piped.model.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    again = [(trainer.train(), losses(trainer)[-1])[1] for trainer in (plain, piped)]
    assert again[1] == pytest.approx(again[0], rel=1e-4)


def test_losses_of_half_precision_weights_are_in_float32(tmp_path: Path) -> None:
    both(tmp_path, lambda: llama().to(torch.bfloat16), rows(16), max_steps=1)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", "single_label_classification"])
def test_problem_types_and_the_loss_of_an_update_are_those_of_trainer(problem: str, tmp_path: Path) -> None:
    labels = {"regression": lambda i: float(i), "multi_label_classification": lambda i: [1.0, i % 2, 0.0]}.get(
        problem, lambda i: i % 3
    )
    count = 1 if problem == "regression" else 3
    texts = [{"input_ids": row["input_ids"], "labels": torch.tensor(labels(i))} for i, row in enumerate(rows(16))]
    images = [{"pixel_values": torch.randn(3, 8, 8), "labels": row["labels"]} for row in texts]
    for name, data in ((BERT, texts), (VIT, images)):
        plain, piped = both(
            tmp_path,
            lambda name=name: tiny(name, torch.float32, tied=True, num_labels=count, problem_type=problem),
            data,
            optim="sgd",
            max_steps=2,
        )
        assert piped.model.config.to_dict() == plain.model.config.to_dict()


def collated(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pad rows to the longest one of the batch, without a mask, and hide random tokens with three generators."""
    length = max(len(row["input_ids"]) for row in batch)
    found = torch.full((len(batch), length), 1)
    for i, row in enumerate(batch):
        found[i, : len(row["input_ids"])] = row["input_ids"]
    hidden = (torch.rand(found.shape) < 0.2) | torch.from_numpy(np.random.rand(*found.shape) < 0.1)
    hidden[0, random.randrange(length)] = True
    return {"input_ids": found.masked_fill(hidden, 2), "labels": found.masked_fill(~hidden, -100)}


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_collators_that_draw_and_rows_of_all_lengths_give_the_losses_of_trainer_and_resume(strategy: str, tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"][: 5 + i * 5 % 8]} for i, row in enumerate(rows(20))]
    settings = {"train_sampling_strategy": strategy, "remove_unused_columns": False, "data_collator": collated, "max_steps": 6}
    settings |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": data[:7]}

    def model() -> Any:
        return tiny("BertForMaskedLM", torch.float32)

    _, whole = both(tmp_path, model, data, **settings)
    named = {key: settings.pop(key) for key in NAMED if key in settings}
    again = PetraTrainer(
        model(), arguments(tmp_path / "PetraTrainer", **{**SHORT, **settings}), train_dataset=data, stages=2, **named
    )
    again.train(resume_from_checkpoint=str(tmp_path / "PetraTrainer/checkpoint-4"))
    assert losses(again) == losses(whole)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(rows(10))


class Once(IterableDataset):  # type: ignore[type-arg]
    """Rows that are read once: a second reader gets those that are left. Their number is known."""

    def __init__(self) -> None:
        self.rows = iter(rows(24))

    def __iter__(self) -> Any:
        return self.rows

    def __len__(self) -> int:
        return 24


def test_no_batch_of_a_stream_is_left_out(tmp_path: Path) -> None:
    settings = {"remove_unused_columns": False, "data_collator": collated}
    each = both(tmp_path, lambda: tiny("BertForMaskedLM", torch.float32), Once, **settings)
    both(tmp_path, llama, Once, eval_dataset=Once(), eval_strategy="steps", eval_steps=3)
    found = []
    for trainer in each:
        transformers.set_seed(3)
        found.append(trainer.evaluate(Once())["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_data_without_a_length_and_loaders_of_ones_own(tmp_path: Path) -> None:
    both(tmp_path, llama, Stream(), max_steps=7, gradient_accumulation_steps=1)
    collate = functools.partial(torch.utils.data.default_collate)
    loader = overridden("get_train_dataloader", lambda make, self: DataLoader(rows(12), batch_size=4, collate_fn=collate))
    both(tmp_path, llama, rows(8), kinds=loader)


def test_lengths_are_found_at_the_start(tmp_path: Path) -> None:
    long = [{"input_ids": torch.arange(3, 33), "labels": torch.arange(3, 33)}]
    both(tmp_path, llama, rows(8), eval_dataset=[*rows(3), *long][3:], eval_strategy="epoch")
    texts = [{"text": row["input_ids"][: 5 + i // 2]} for i, row in enumerate(rows(16))]

    def of_texts(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        return collated([{"input_ids": row["text"]} for row in batch])

    both(tmp_path, lambda: tiny("BertForMaskedLM", torch.float32), texts, remove_unused_columns=False, data_collator=of_texts)
    refused_rows = [*rows(8), {"input_ids": torch.tensor([VOCABULARY] * 12), "labels": torch.tensor([1] * 12)}]
    with pytest.raises(
        PetraError, match=f"row 8: expected tokens below {VOCABULARY}, the vocabulary of the model, got {VOCABULARY}"
    ):
        PetraTrainer(llama(), arguments(tmp_path, **SHORT), train_dataset=refused_rows).train()
    with pytest.raises(PetraError, match=f"batch, input_ids: expected tokens below {VOCABULARY}, the vocabulary of the model"):
        PetraTrainer(llama(), arguments(tmp_path, **SHORT), train_dataset=refused_rows, max_length=12).train()
    with pytest.raises(PetraError, match="max_length: expected at most 32, the positions of the model, got 33"):
        both(tmp_path, lambda: tiny("GPT2LMHeadModel", torch.float32), rows(8), lambda t: setattr(t, "_max_length", 33))
    settings = {**SHORT, "dataloader_drop_last": True, "max_steps": -1}
    with pytest.raises(ConfigError, match=r"num_train_epochs: .* there would be no update"):
        PetraTrainer(llama(), arguments(tmp_path, **settings), train_dataset=rows(3)).train()


def flattened(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    joined = {name: torch.cat([row[name] for row in batch])[None] for name in ("input_ids", "labels")}
    return {**joined, "position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in batch])[None]}


def test_a_flattening_collator_makes_one_row(tmp_path: Path) -> None:
    settings = arguments(tmp_path, **SHORT)
    trainer = PetraTrainer(llama(), settings, train_dataset=rows(16), data_collator=flattened, stages=2)
    trainer.train()
    assert trainer.form.shape == (1, 2, 48)


def metrics(prediction: Any) -> dict[str, float]:
    hits = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    return {"hits": float(hits.sum()), "sum": float(prediction.predictions.sum())}


def test_metrics_prediction_and_the_best_model(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
    }
    settings |= {
        "metric_for_best_model": "eval_a_hits",
        "label_smoothing_factor": 0.1,
        "max_steps": 8,
        "per_device_eval_batch_size": 6,
    }
    best = {"compute_metrics": metrics, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    sets = {"a": rows(10), "b": rows(7)}
    found = both(tmp_path, llama, rows(32), eval_dataset=sets, callbacks=[EarlyStoppingCallback(3)], **best, **settings)
    plain, piped = ([row for row in each.state.log_history if "eval_a_hits" in row] for each in found)
    assert [(row["step"], row["eval_a_hits"], row["eval_a_sum"]) for row in plain] == [
        (row["step"], row["eval_a_hits"], row["eval_a_sum"]) for row in piped
    ]
    assert [[*row] for row in piped] == [[*row] for row in plain]
    assert {*found[1].evaluate(rows(4))} == {*found[0].evaluate(rows(4))}
    assert found[0].state.best_global_step == found[1].state.best_global_step
    first, second = (each.predict(rows(9)) for each in found)
    assert (first.predictions == second.predictions).all()
    assert (first.label_ids == second.label_ids).all()
    assert second.metrics["test_loss"] == pytest.approx(first.metrics["test_loss"], rel=1e-4)
    longer = [{"input_ids": torch.arange(3, 33), "labels": torch.arange(3, 33)}]
    assert found[1].predict(longer).predictions.shape == (1, 30)


class Counts(TrainerCallback):
    """Counts events, and the types of what they get."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **named: self.found.append(
            (name, state.global_step, type(named["optimizer"]).__name__, type(named["lr_scheduler"]).__name__)
        )


def test_callbacks_get_the_events_of_trainer(tmp_path: Path) -> None:
    found = []
    for kind in (Trainer, PetraTrainer):
        counts = Counts()
        args = arguments(tmp_path / kind.__name__, **SHORT, eval_strategy="steps", eval_steps=2)
        kind(llama(), args, train_dataset=rows(16), eval_dataset=rows(9), callbacks=[counts]).train()
        found.append(counts.found)
    assert found[0] == found[1]
    assert {"on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step"} <= {name for name, *_ in found[1]}


def test_checkpoints_are_exchanged_with_trainer_and_a_stopped_run_stays_stopped(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "linear"}
    plain, _ = both(tmp_path, llama, rows(40), **settings)
    for kind, folder, others in ((Trainer, "PetraTrainer", {}), (PetraTrainer, "Trainer", {"stages": 3})):
        args = arguments(tmp_path / "again" / kind.__name__, **{**SHORT, **settings})
        again = kind(llama(), args, train_dataset=rows(40), **others)
        again.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2"))
        torch.testing.assert_close(torch.tensor(losses(again)), torch.tensor(losses(plain)), rtol=1e-5, atol=0)
    stops = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "learning_rate": 0.0, "metric_for_best_model": "eval_loss"}

    def early(name: str) -> Any:
        args = arguments(tmp_path / name, **{**SHORT, **settings, **stops, "greater_is_better": False})
        callback = EarlyStoppingCallback(2)
        return PetraTrainer(llama(), args, train_dataset=rows(40), eval_dataset=rows(4), callbacks=[callback], stages=2)

    whole = early("early")
    whole.train()
    for step in (2, 3):
        again = early(f"from{step}")
        again.train(resume_from_checkpoint=str(tmp_path / f"early/checkpoint-{step}"))
        assert again.state.global_step == whole.state.global_step == 3


class Own(TrainingArguments):
    pass


def test_checkpointing_optimizers_and_arguments(tmp_path: Path) -> None:
    """Layers store their inputs; an optimizer is the one that Trainer makes; what has no effect is accepted."""
    settings = {"activation_checkpointing": True, "optim": "adafactor", "ddp_find_unused_parameters": True}
    _, piped = both(tmp_path, llama, rows(16), **settings)
    kinds = {type(worker.update.optimizer).__name__ for worker in piped.pipeline.workers.values()}
    assert kinds == {"Adafactor"}
    assert {keep.name for stage in piped.pipeline.plan.stages[:-1] for keep in stage.keeps} == {"INPUT"}
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss", "eval_dataset": rows(4)}
    both(tmp_path, llama, rows(16), **plateau, eval_strategy="steps", eval_steps=1, max_steps=4)


def test_a_stop_during_a_run_without_flush_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    args = arguments(tmp_path, **{**SHORT, "max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, "max_grad_norm": 0})
    trainer = PetraTrainer(
        llama(), args, train_dataset=rows(80), eval_dataset=rows(4), callbacks=[Stop()], method="petra", stages=2
    )
    trainer.train()
    assert trainer.state.global_step == 4
    assert "asked for in a callback at update 2: at the next drain, 2 later" in capsys.readouterr().out


def eager(**settings: Any) -> Any:
    model = tiny("Gemma2ForCausalLM", torch.float64)
    model.set_attn_implementation("eager")
    return from_pretrained(model, **settings).build(0)


def test_documents_of_a_model_with_eager_attention_do_not_see_each_other() -> None:
    """Gemma 2 is loaded with it. Its softmax is in float32, so its last bits depend on the length of a row."""
    tokens = torch.randint(4, VOCABULARY, (2, 12))
    tokens[:, [0, 7]] = 3
    together = eager(delimiter=3)(tokens).unflatten(0, (2, -1))
    alone = [eager()(part).unflatten(0, (2, -1)) for part in (tokens[:, :7], tokens[:, 7:])]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-3, atol=1e-5)


def test_memory_and_speed_are_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has a weight, a gradient and two moments of Adam for each parameter, and not much more for a few tokens."""
    monkeypatch.setattr("petra.huggingface.forecast.SMALL", 0)
    model = tiny(LLAMA, torch.float32, hidden_size=128, intermediate_size=256)
    args = arguments(tmp_path, **{**SHORT, "max_steps": 1, "per_device_train_batch_size": 1})
    PetraTrainer(model, args, train_dataset=rows(8), stages=2).train()
    found = re.search(r"predicted memory: (\S+) GB in process 0; speed: unknown, as nothing is measured\n", capsys.readouterr().out)
    assert found
    least = 16 * sum(p.numel() for p in model.parameters()) / 1e9
    assert least < float(found[1]) < 1.3 * least


def test_settings_that_would_fail_later_are_refused_before_training(tmp_path: Path) -> None:
    unsavable = llama()
    unsavable.generation_config.temperature = 0.3
    args = arguments(tmp_path, **SHORT, save_strategy="steps", save_steps=1)
    with pytest.raises(ConfigError, match=r"model.generation_config: .*`temperature` is set to `0.3`"):
        PetraTrainer(unsavable, args, train_dataset=rows(16)).train()
    counted = arguments(tmp_path, **SHORT, include_num_input_tokens_seen="all")
    with pytest.raises(ConfigError, match="include_num_input_tokens_seen: expected no, without flush, got all"):
        PetraTrainer(llama(), counted, train_dataset=rows(16), method="petra", stages=2).train()
    dynamic = tiny(LLAMA, torch.float32, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(PetraError, match=r"model: expected weights .*, got none in model.embed_tokens.weight"):
        PetraTrainer(llama().to("meta"), arguments(tmp_path), train_dataset=rows(16))
    partly = llama()
    partly.model.rotary_emb.to("meta")
    with pytest.raises(PetraError, match=r"model: expected weights .*, got none in model.rotary_emb.inv_freq"):
        PetraTrainer(partly, arguments(tmp_path), train_dataset=rows(16))
    refused(dynamic, tmp_path, "rope_type: expected one whose tables depend on positions only, .*, got dynamic")
