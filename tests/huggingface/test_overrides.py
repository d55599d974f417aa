"""What a script sets, replaces or reads around ``PetraTrainer`` acts as it does around ``Trainer``, or is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, default_collate
from transformers import BatchEncoding, DataCollatorForLanguageModeling, Trainer, TrainerCallback

from petra import PetraError
from petra.huggingface import PetraTrainer
from tests.huggingface.models import tiny
from tests.huggingface.test_adapters import numbers
from tests.huggingface.test_trainer import arguments, rows
from tests.support.processes import run_processes

SHORT = {"max_steps": 3, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0, "max_grad_norm": 0.0}


def llama(**settings: Any) -> Any:
    return tiny("LlamaForCausalLM", torch.float32, **settings)


def images(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": i % 3} for i in range(count)]


def vit() -> Any:
    return tiny("ViTForImageClassification", torch.float32)


class Run:
    """One of both trainers, and what it has logged.

    Args:
        kind: Class of the trainer.
        others: Arguments that only ``PetraTrainer`` has.
    """

    def __init__(self, kind: Any, folder: Path, **others: Any) -> None:
        self.kind, self.folder, self.others = kind, folder, {} if kind is Trainer else {"stages": 2, **others}

    def overriding(self, **methods: Any) -> "Run":
        made = Run(type("Mine", (self.kind,), methods), self.folder)
        made.others = self.others
        return made

    def make(self, model: Any, named: dict[str, Any] | None = None, **settings: Any) -> Any:
        args = arguments(self.folder / self.kind.__name__, **{**SHORT, **settings})
        return self.kind(model, args, **{"train_dataset": rows(24), **self.others, **(named or {})})

    def losses(self, trainer: Any) -> list[float]:
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def device_of_model(run: Run) -> Any:
    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
        labels = inputs.pop("labels")
        weight = torch.arange(61.0, device=model.device).to(next(model.parameters()).dtype)
        loss = nn.functional.cross_entropy(model(**inputs)["logits"].flatten(0, 1), labels.flatten(), weight)
        return (loss, None) if return_outputs else loss

    return run.losses(run.overriding(compute_loss=compute_loss).make(llama()))


def tied_with_an_optimizer(run: Run) -> Any:
    model = llama(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return run.losses(run.make(model, {"optimizers": (optimizer, None)}))


def tied_from_a_function(run: Run) -> Any:
    return run.losses(run.make(None, {"model_init": lambda: llama(tied=True)}))


def tied_head_with_adapters(run: Run) -> Any:
    model = get_peft_model(llama(tied=True), LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    return run.losses(run.make(model))


class Signs(torch.optim.Optimizer):
    """Keeps a setting as an attribute, and counts its steps in its groups."""

    def __init__(self, parameters: Any, lr: float, signs: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})
        self.signs = signs

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * group["count"] * (p.grad.sign() if self.signs else p.grad))


def an_optimizer_with_settings_and_counts(run: Run) -> Any:
    model, settings = llama(), {"save_strategy": "steps", "save_steps": 2}
    trainer = run.make(model, {"optimizers": (Signs(model.parameters(), 1e-3, signs=True), None)}, **settings)
    found = run.losses(trainer)
    state = torch.load(Path(trainer.args.output_dir) / "checkpoint-2" / "optimizer.pt", weights_only=True)
    return [*found, float(state["param_groups"][0]["count"])]


def images_in_a_wrapped_forward(run: Run) -> Any:
    model = vit()
    inner = model.forward

    def forward(pixel_values: Any = None, **named: Any) -> Any:
        found = inner(pixel_values=pixel_values, **named)
        found["loss"] = found["loss"] * pixel_values.abs().mean()
        return found

    model.forward = forward
    return run.losses(run.make(model, {"train_dataset": images(24)}))


def images_in_a_loss_of_the_instance(run: Run) -> Any:
    trainer = run.make(vit(), {"train_dataset": images(24)})
    inner = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **named: inner(model, inputs, **named) * inputs["pixel_values"].abs().mean()
    return run.losses(trainer)


def images_in_metrics(run: Run) -> Any:
    named = {"eval_dataset": images(8), "compute_metrics": lambda found: {"sum": float(abs(found.inputs).sum())}}
    return [run.make(vit(), named, include_for_metrics=["inputs"]).evaluate()["eval_sum"]]


def a_prediction_step_of_the_instance(run: Run) -> Any:
    trainer = run.make(llama(), {"eval_dataset": rows(8)})
    trainer.prediction_step = lambda model, inputs, only, ignore_keys=None: (inputs["labels"].float().mean(), None, None)
    return [trainer.evaluate()["eval_loss"], float("prediction_step" in vars(trainer))]


def predictions_in_an_evaluation(run: Run) -> Any:
    def evaluate(self: Any, *others: Any, **named: Any) -> Any:
        loader = self.get_eval_dataloader()
        return self.evaluation_loop(loader, description="Evaluation", prediction_loss_only=False)

    found = run.overriding(evaluate=evaluate).make(llama(), {"eval_dataset": rows(8)}).evaluate()
    return found.predictions.flatten().tolist()


def a_collator_with_a_seed(run: Run) -> Any:
    tokenizer: Any = numbers()
    tokenizer.mask_token = "2"
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=5)
    data = [{"input_ids": row["input_ids"]} for row in rows(24)]
    named = {"train_dataset": data, "data_collator": collator}
    trainer = run.make(tiny("BertForMaskedLM", torch.float32), named, save_strategy="steps", save_steps=2)
    found = run.losses(trainer)
    again = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=5)
    resumed = run.make(tiny("BertForMaskedLM", torch.float32), {**named, "data_collator": again}, max_steps=3)
    if run.kind is PetraTrainer:  # Trainer begins the collator's numbers again
        resumed.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2"))
        assert resumed.state.log_history[-2]["loss"] == found[-1]
    return found


class Drawn(Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator, self.rows = torch.Generator().manual_seed(3), rows(24)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        tokens = self.rows[i]["input_ids"].clone()
        tokens[torch.rand(12, generator=self.generator) < 0.3] = 2
        return {**self.rows[i], "input_ids": tokens}


def data_with_a_generator(run: Run) -> Any:
    return run.losses(run.make(llama(), {"train_dataset": Drawn()}))


def a_trial_of_a_search(run: Run) -> Any:
    trainer = run.make(None, {"model_init": lambda: llama()})
    trainer.create_accelerator_and_postprocess()  # as for each trial
    return [*run.losses(trainer), float(sum(p.norm() for p in trainer.model.parameters()))]


def attributes_of_a_batch(run: Run) -> Any:
    """An evaluated batch is two microbatches."""

    def collate(batch: Any) -> Any:
        return BatchEncoding(default_collate(batch))

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
        found = model(input_ids=inputs.input_ids, labels=inputs.labels)
        return (found.loss, found) if return_outputs else found.loss

    named = {"data_collator": collate, "eval_dataset": rows(16)}
    trainer = run.overriding(compute_loss=compute_loss).make(llama(), named, per_device_eval_batch_size=8)
    return [*run.losses(trainer), trainer.evaluate()["eval_loss"]]


ACTING = [
    *(
        device_of_model,
        tied_with_an_optimizer,
        tied_from_a_function,
        tied_head_with_adapters,
        an_optimizer_with_settings_and_counts,
    ),
    *(images_in_a_wrapped_forward, images_in_a_loss_of_the_instance, images_in_metrics, a_prediction_step_of_the_instance),
    *(attributes_of_a_batch, predictions_in_an_evaluation, a_collator_with_a_seed, data_with_a_generator, a_trial_of_a_search),
]


@pytest.mark.parametrize("case", ACTING, ids=lambda case: case.__name__)
def test_it_acts_as_in_trainer(case: Callable[[Run], Any], tmp_path: Path) -> None:
    expected, found = (case(Run(kind, tmp_path)) for kind in (Trainer, PetraTrainer))
    assert expected
    assert found == pytest.approx(expected, rel=1e-5)


def test_targets_may_be_missing_where_the_loss_is_computed_in_chunks(tmp_path: Path) -> None:
    """A microbatch of an update, and a part of an evaluated batch, without targets."""
    data = [{**row, "labels": torch.full_like(row["labels"], -100)} if i < 4 else row for i, row in enumerate(rows(8))]
    settings = {"train_sampling_strategy": "sequential", "per_device_eval_batch_size": 8}
    found = []
    for run in (Run(Trainer, tmp_path), Run(PetraTrainer, tmp_path, loss_rows=7)):
        trainer = run.make(llama(), {"train_dataset": data, "eval_dataset": data}, **settings)
        found.append([*run.losses(trainer), trainer.evaluate()["eval_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_in_chunks_is_divided_as_that_of_the_model(smoothing: float, tmp_path: Path) -> None:
    """``BertForMaskedLM`` computes a mean of each microbatch, which ``Trainer`` adds up, unless it smooths labels itself."""
    found = []
    for run in (Run(Trainer, tmp_path), Run(PetraTrainer, tmp_path, loss_rows=7)):
        trainer = run.make(tiny("BertForMaskedLM", torch.float32), {"eval_dataset": rows(7)}, label_smoothing_factor=smoothing)
        found.append([*run.losses(trainer), trainer.evaluate()["eval_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


# ---- Learning rates of methods that don't flush


def of_an_optimizer(run: Run) -> Any:
    model = llama()
    return run.make(model, {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.5), None)}, learning_rate=1e-9)


def of_a_scheduler(run: Run) -> Any:
    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler, self._created_lr_scheduler = LambdaLR(self.optimizer, lambda step: 50.0 * (step != 1)), True
        return self.lr_scheduler

    return run.overriding(create_scheduler=create_scheduler).make(llama(), optim="sgd")


@pytest.mark.parametrize("made", [of_an_optimizer, of_a_scheduler])
def test_learning_rates_act_without_flush(made: Any, tmp_path: Path) -> None:
    """One stage with delay 0 updates as plain PyTorch does."""
    plain, late = Run(Trainer, tmp_path), Run(PetraTrainer, tmp_path, method="dsp", stages=1)
    expected, found = ((trainer := made(run), run.losses(trainer)) for run in (plain, late))
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    two = made(Run(PetraTrainer, tmp_path, method="dsp"))
    before = two.model.lm_head.weight.detach().clone()
    two.train()
    change, wanted = (float((each.model.lm_head.weight.detach() - before).abs().max()) for each in (two, expected[0]))
    assert wanted / 2 < change < 2 * wanted


# ---- What is refused


def penalty(run: Run) -> Any:
    def compute_loss(self: Any, model: Any, inputs: Any, **named: Any) -> Any:
        return model(**inputs)["loss"] + sum(p.square().sum() for p in model.parameters() if p.requires_grad)

    return run.overriding(compute_loss=compute_loss).make(llama()).train()


def weights_of_the_head(run: Run) -> Any:
    def prediction_step(self: Any, model: Any, *others: Any, **named: Any) -> Any:
        return model.lm_head.weight.sum(), None, None

    return run.overriding(prediction_step=prediction_step).make(llama(), {"eval_dataset": rows(8)}).evaluate()


def step_of(change: Callable[[Any, Any], object], *, after: bool = False) -> Callable[[Run], Any]:
    """Return a training whose steps change inputs before, or the model after those of ``Trainer``."""

    def case(run: Run) -> Any:
        class Mine(run.kind):  # type: ignore[name-defined, misc]
            def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
                change(model, inputs)
                return super().training_step(model, inputs, *others)

        class Later(run.kind):  # type: ignore[name-defined, misc]
            def training_step(self, model: Any, *others: Any) -> Any:
                loss = super().training_step(model, *others)
                model.lm_head.weight.grad = None
                return loss

        mine = Run(Later if after else Mine, run.folder)
        return mine.make(llama()).train()

    return case


class Callback(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        print([p.grad for p in model.parameters()])


class Rates(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **named: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.0


def inputs_of_the_instance(run: Run) -> Any:
    trainer = run.make(llama())
    trainer._prepare_inputs = dict
    return trainer.train()


class Modes(torch.optim.SGD):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def trained(named: Any = None, model: Any = llama, others: Any = None, **settings: Any) -> Callable[[Run], Any]:
    return lambda run: Run(run.kind, run.folder, **(others or {})).make(model(), named, **settings).train()


def modes(run: Run) -> Any:
    model = llama()
    return run.make(model, {"optimizers": (Modes(model.parameters(), 0.1), None)}).train()


def fewer(run: Run) -> Any:
    model = llama()
    return run.make(model, {"optimizers": (torch.optim.SGD([model.lm_head.weight], 0.1), None)}).train()


def autocast(run: Run) -> Any:
    return run.overriding(compute_loss_context_manager=lambda self: torch.autocast("cpu", torch.bfloat16)).make(llama())


def masks_of_pairs(run: Run) -> Any:
    def collate(batch: Any) -> Any:
        return {**default_collate(batch), "attention_mask": torch.ones(len(batch), 1, 12, 12).tril()}

    return run.make(llama(), {"data_collator": collate}).train()


def made(**settings: Any) -> Callable[[Run], Any]:
    return lambda run: run.make(llama(), **settings)


def hidden_states(run: Run) -> Any:
    model = llama()
    model.config.output_hidden_states = True
    return run.make(model).predict(rows(8))


def scaled(run: Run) -> Any:
    return Run(run.kind, run.folder, **CHUNKS).overriding(loss_is_scaled_for_ga=False).make(llama()).train()


def of_type(name: str) -> Any:
    model = llama()
    model.loss_type = name
    return model


def with_loss(model: Any) -> Any:
    model.loss_function = print
    return model


CHUNKS = {"loss_rows": 7}
METRICS: dict[str, Any] = {"compute_metrics": lambda found: {}}
UNLABELED = [{"input_ids": row["input_ids"]} for row in rows(8)]
OF_THE_BATCH = "training_step: expected the inputs of the batch, which the pipeline has read already, got others"
REFUSED = [
    (penalty, "embed_tokens.weight in compute_loss: expected a loss of the model's outputs, .* got one that reads weights"),
    (step_of(print, after=True), "Later.training_step: expected one that leaves gradients alone: .* got one that does not"),
    (step_of(lambda model, inputs: inputs.update(input_ids=inputs["input_ids"] * 0)), OF_THE_BATCH),
    (step_of(lambda model, inputs: inputs["labels"].zero_()), OF_THE_BATCH),
    (step_of(lambda model, inputs: inputs.pop("labels")), OF_THE_BATCH),
    (inputs_of_the_instance, "PetraTrainer: expected methods that a pipeline calls, .* got its own _prepare_inputs"),
    (weights_of_the_head, "weight in compute_loss: expected a loss of the model's outputs"),
    (trained({"callbacks": [Callback()]}), "Callback.on_pre_optimizer_step: expected a callback that reads no gradients"),
    (trained({"callbacks": [Rates()]}, others={"method": "dsp"}), "method: expected one that flushes, where a callback sets"),
    (trained({"eval_dataset": rows(8)}, others={"method": "dsp"}, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"),
     "method: expected one that flushes, or a learning rate that is a function of the update"),
    (modes, "optimizer: expected one whose weights are the same in training and evaluation .* got Modes"),
    (fewer, r"optimizer: expected one of all parameters that require gradients \(freeze others\), got one without"),
    (trained(METRICS, others=CHUNKS), "loss_rows: expected None with .* compute_metrics, which need logits, got 7"),
    (trained(model=lambda: with_loss(llama()), others=CHUNKS), "loss_rows: expected None with a loss"),
    (scaled, "loss_rows: expected None with a loss_is_scaled_for_ga, got 7"),
    (trained(model=lambda: of_type("ForMaskedLM"), others=CHUNKS), "loss_rows: expected None with another loss than"),
    (trained({"train_dataset": images(8)}, model=vit, others=CHUNKS), "loss_rows: expected None with another loss"),
    (lambda run: Run(run.kind, run.folder, **CHUNKS).make(llama()).predict(rows(8)), "loss_rows: expected None where logits"),
    (lambda run: Run(run.kind, run.folder, **CHUNKS).make(llama(), prediction_loss_only=True).predict(UNLABELED),
     "loss_rows: expected None for rows without labels"),
    (autocast, "Mine: expected methods that a pipeline calls, .* got its own compute_loss_context_manager"),
    (masks_of_pairs, r"^batch: expected integers \[4, 12\] as attention_mask, one for each token, got \[4, 1, 12, 12\]"),
    (made(train_sampling_strategy="batch_rebalance"), "got train_sampling_strategy=batch_rebalance"),
    (made(activation_checkpointing_kwargs={"use_reentrant": False, "offload": True}), "_kwargs with offload"),
    (lambda run: Run(run.kind, run.folder, extensions=["x"]).make(llama()), "^extensions: expected objects of .*, got 'x'"),
    (hidden_states, "model.config: expected one that asks for logits alone in predictions, got output_hidden_states"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "message"), REFUSED)
def test_it_is_refused_in_one_line(case: Callable[[Run], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PetraError, match=message) as error:
        case(Run(PetraTrainer, tmp_path))
    assert len(str(error.value).splitlines()) == 1


def test_images_that_have_not_travelled_cannot_be_read(tmp_path: Path) -> None:
    """A stand-in tells its shape, and is joined with those of other parts of a batch; its numbers are none."""
    trainer = Run(PetraTrainer, tmp_path).make(vit(), {"train_dataset": images(8)})
    form = trainer.pipeline and trainer.form
    part = {"pixel_values": torch.ones(form.shape), "labels": torch.zeros(form.rows, dtype=torch.int64)}
    batch, _ = form.unpack(form.pack(part)[form.passed :])
    both = torch.cat([batch["pixel_values"]] * 2)
    assert both.shape == (2 * form.rows, 3, 8, 8)
    for read in (lambda t: t.sum(), lambda t: t[0], torch.square, lambda t: t.to("cpu"), lambda t: t == t, list):
        with pytest.raises(PetraError, match=r"^pixel_values: expected a loss and callbacks that read no images"):
            read(both)


# ---- Callbacks in two processes


class Looking(TrainerCallback):
    """Notes norms of the first and of the last weights: at the end of training, at decorated and at forwarded events."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, float]] = []

    def look(self, event: str, given: Any) -> None:
        model = given["model"]
        norms = (float(t.detach().norm()) for t in (model.model.embed_tokens.weight, model.lm_head.weight))
        self.seen.append((event, *norms))

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.look("step", named)


class AtTheEnd(Looking):
    on_step_begin = TrainerCallback.on_step_begin  # type: ignore[assignment]

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.look("end", named)


class Decorated(AtTheEnd):
    @torch.no_grad()
    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        self.look("log", {"model": model})


def looked(run: Run) -> list[Any]:
    found = []
    for kind in (Looking, AtTheEnd, Decorated):
        callback = kind()
        run.losses(run.make(llama(), {"callbacks": [callback]}))
        found.append(callback.seen)
    return found


def in_a_process(rank: int, folder: str) -> list[Any]:
    from tests.huggingface.models import as_torchrun

    as_torchrun(rank, 2)
    return looked(Run(PetraTrainer, Path(folder)))


@pytest.mark.processes
def test_callbacks_of_all_processes_see_the_whole_model(tmp_path: Path) -> None:
    expected = looked(Run(Trainer, tmp_path))
    for found in run_processes(2, in_a_process, tmp_path, str(tmp_path), timeout=120):
        for events, wanted in zip(found, expected, strict=True):
            assert [name for name, *_ in events] == [name for name, *_ in wanted]
            assert [norms for _, *norms in events] == [pytest.approx(norms, rel=1e-5) for _, *norms in wanted]
