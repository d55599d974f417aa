"""The optimizer, loaders and functions of a script, before, in and after the training of ``PetraTrainer``, as with ``Trainer``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer, TrainerCallback

from petra import PetraError
from petra.huggingface import PetraTrainer
from tests.huggingface.models import as_torchrun
from tests.huggingface.test_overrides import Run, llama
from tests.huggingface.test_trainer import rows
from tests.support.processes import run_processes

MOMENTUM = {"lr": 0.1, "momentum": 0.9}


def with_sgd(run: Run, model: Any, named: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Return a trainer with an optimizer of one's own."""
    optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
    return run.make(model, {"optimizers": (optimizer, None), **(named or {})}, **settings)


def with_states(run: Run, model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), **MOMENTUM)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p) * 0.1
    return run.losses(run.make(model, {"optimizers": (optimizer, None)}))


def given_states(run: Run) -> Any:
    return with_states(run, llama())


def given_states_of_tied_weights(run: Run) -> Any:
    return with_states(run, llama(tied=True))


def a_step_after_training(run: Run) -> Any:
    """It moves weights by the gradient and the momentum of the training."""
    model = llama()
    trainer = with_sgd(run, model)
    trainer.train()
    optimizer, weight = trainer.optimizer.optimizer, model.lm_head.weight
    before = weight.detach().clone()
    optimizer.zero_grad()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return [len(optimizer.state), float((weight.detach() - before).norm())]


def a_second_training_that_resumes(run: Run) -> Any:
    trainer = with_sgd(run, llama(), save_strategy="steps", save_steps=2)
    first = run.losses(trainer)
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2"))
    return [*first, *(float(p.detach().double().norm()) for p in trainer.model.parameters())]


def a_loader_of_the_instance(run: Run) -> Any:
    trainer, data = run.make(llama()), rows(8)
    trainer.get_train_dataloader = lambda: DataLoader(data, batch_size=4, collate_fn=lambda batch: default_collate(batch))
    return [*run.losses(trainer), *run.losses(trainer)]


def a_zero_grad_of_the_model(run: Run) -> Any:
    model = llama()
    inner = model.zero_grad
    own = model.zero_grad = lambda *others, **named: inner(*others, **named)
    run.make(model).train()
    return [float(model.zero_grad is own)]


SAME = [
    *(given_states, given_states_of_tied_weights, a_step_after_training, a_second_training_that_resumes),
    *(a_loader_of_the_instance, a_zero_grad_of_the_model),
]


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.__name__)
def test_it_is_as_in_trainer(case: Callable[[Run], Any], tmp_path: Path) -> None:
    expected, found = (case(Run(kind, tmp_path)) for kind in (Trainer, PetraTrainer))
    assert found == pytest.approx(expected, rel=1e-5)


class Counter:
    calls = 0

    def count(self, optimizer: Any, *others: Any) -> None:
        self.calls += 1


def test_a_hook_of_an_optimizer_is_a_method_of_its_object(tmp_path: Path) -> None:
    model, counter = llama(), Counter()
    trainer = with_sgd(Run(PetraTrainer, tmp_path), model)
    trainer.optimizer.register_step_post_hook(counter.count)
    trainer.train()
    assert counter.calls == 6  # 3 updates of 2 stages


# ---- Callbacks that change what a pipeline could not follow


class Changing(TrainerCallback):
    """Calls a function with the arguments and the optimizer after the first update."""

    def __init__(self, change: Callable[[Any, Any], object]) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **named: Any) -> None:
        if state.global_step == 1:
            self.change(args, optimizer.optimizer)


CHANGES: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda args, optimizer: setattr(args, "gradient_accumulation_steps", 4),
     "^callback: expected one that leaves gradient_accumulation_steps=2, max_grad_norm=0.0, got gradient_accumulation_steps=4,"),
    (lambda args, optimizer: setattr(args, "max_grad_norm", 1.0), r"^callback: .*got gradient_.*, max_grad_norm=1\.0$"),
    (lambda args, optimizer: optimizer.state.clear(), r"^optimizer\.state: expected callbacks that leave it alone"),
    (lambda args, optimizer: [s["momentum_buffer"].zero_() for s in optimizer.state.values()], r"^optimizer\.state: expected"),
]  # fmt: skip


@pytest.mark.parametrize("method", ["1f1b", "dsp"])
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_change_that_would_be_lost_is_refused(change: Any, message: str, method: str, tmp_path: Path) -> None:
    trainer = with_sgd(Run(PetraTrainer, tmp_path, method=method), llama(), {"callbacks": [Changing(change)]})
    with pytest.raises(PetraError, match=message):
        trainer.train()
    trainer.optimizer.optimizer.state.clear()  # in training only


def no_momentum(args: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["momentum"] = 0.0


def in_a_process(rank: int, folder: str) -> str | None:
    as_torchrun(rank, 2)
    run = Run(PetraTrainer, Path(folder), method="dsp")
    at_a_drain = with_sgd(run, llama(), {"eval_dataset": rows(4), "callbacks": [Changing(no_momentum)]}, eval_strategy="steps")
    at_a_drain.train()
    norms = [float(p.norm()) for p in at_a_drain.model.parameters()]
    trainer = with_sgd(run, llama(), {"callbacks": [Changing(no_momentum)]})
    with pytest.raises(Exception) as error:  # noqa: PT011
        trainer.train()
    return f"{norms} {error.value if rank == 0 else ''}"


@pytest.mark.processes
def test_settings_change_in_all_processes_at_once_or_not_at_all(tmp_path: Path) -> None:
    first, second = run_processes(2, in_a_process, tmp_path, str(tmp_path), timeout=120)
    assert first.endswith("method: expected one that flushes, where a callback changes settings of the optimizer, got dsp")
    assert first.startswith(second)
