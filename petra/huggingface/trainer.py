"""``transformers.Trainer`` whose processes are the stages of a pipeline."""

from __future__ import annotations

import atexit
import math
import os
import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import has_length

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.engine.options.extension import Extension
from petra.errors import ConfigError, ModelError, require
from petra.huggingface.arguments import check_arguments, check_methods
from petra.huggingface.blocks import split
from petra.huggingface.callbacks import ONLY_AT, reading_events, restore_callbacks
from petra.huggingface.evaluation import Evaluating
from petra.huggingface.feed import Reader, is_unchanged, numbers, source_of, versions
from petra.huggingface.inputs import FIELDS
from petra.huggingface.load import base_of, check_generation, shared, with_all_weights
from petra.huggingface.optimizers import copy_settings, gather_states, read_states, states_of, without, without_steps
from petra.huggingface.replaced import replaced
from petra.huggingface.stepwise import Stepwise
from petra.method import METHODS, Keep, Method
from petra.pipeline import Pipeline
from petra.plan.layout import processes_per_replica
from petra.training.checkpoint import Checkpoints, facts_of, newest, restore

PETRA, READER = "petra", "reader.pt"
"""In a folder ``checkpoint-<step>``: a checkpoint of the pipeline, states of random numbers, and files of ``Trainer``."""
WANTED = ("should_evaluate", "should_save", "should_training_stop", "should_epoch_stop")
"""What callbacks ask for that all processes do together."""
CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


class PetraTrainer(Evaluating):
    """Trains a model of ``transformers`` as ``Trainer`` does, over a pipeline whose stages are the processes of ``torchrun``.

    A microbatch has ``per_device_train_batch_size`` rows, and an update ``gradient_accumulation_steps`` microbatches. Every process
    must make the same calls, with the same model. The first one reads the data; what the loss needs travels to the last stage.
    The loop, its callbacks, logs, schedules, evaluation and checkpoints are those of ``Trainer``, and the loss is what
    ``compute_loss`` returns for the model, on the last stage. Differences:

    * With late gradients, an embedding and a head that share weights are trained apart, and the model is saved so.
    * Weights have already changed at ``on_pre_optimizer_step``.
    * With a method that doesn't flush, logs have no ``grad_norm``, gradients are clipped by the norm of each stage, callbacks of
      other processes than the first get the events of several updates at once, and what they ask for comes at the next drain.
    * Dropout draws other random numbers.

    Args:
        arguments, named: As for ``transformers.Trainer``.
        method: A name from :data:`petra.METHODS`, or a method. The default computes the same gradients as ``Trainer``.
        stages: Number of stages, or number of blocks in each: embedding, layers, head. None: one stage per process of a replica.
        dp: Number of replicas of the pipeline. Each reads its own part of the data, as a process of ``Trainer`` does.
        max_length: Number of tokens of a row; shorter rows are padded. None: those of the longest row of the data sets, all of
            which are read for it at the start. If these can't be indexed: ``max_length`` of the arguments, if they have it, as
            ``SFTConfig``, or those of the first batch.
        loss_rows: Compute the loss in chunks of so many tokens, without whole logits (:mod:`petra.models.head_loss`); None: don't.
        extensions: What else acts in a run, such as remedies for stale gradients (:mod:`petra.staleness`).

    Raises:
        ConfigError: If an argument can't be mapped, or a method is overridden that is not called. The message names all.
        ModelError: If the class of the model is not supported.
    """

    def __init__(
        self,
        *arguments: Any,
        method: str | Method = "1f1b",
        stages: int | Sequence[int] | None = None,
        dp: int = 1,
        max_length: int | None = None,
        loss_rows: int | None = None,
        extensions: Sequence[Extension] = (),
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        check_arguments(self, PetraTrainer)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())  # gloo's threads could abort the process
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.dp, processes = dp, processes_per_replica(self.world, dp)
        self.replica, place = divmod(self.rank, processes)
        self.reads = place == 0
        if dp > 1:
            groups = [dist.new_group([*range(p, self.world, processes)], backend="gloo") for p in range(processes)]
            self._peers = groups[place]
        self._alone()
        self.control: Any = self.control  # of Trainer
        self._method: Any = METHODS[method] if isinstance(method, str) and method in METHODS else method
        if self.args.activation_checkpointing and isinstance(self._method, Method):
            self._method = replace(self._method, keep=Keep.INPUT)
        self._stages = processes if stages is None else stages
        other = next((each for each in extensions if not isinstance(each, Extension)), None)
        require(other is None, "extensions", "objects of classes of petra, such as petra.staleness.WeightPrediction", repr(other))
        self._max_length, self._loss_rows, self._extensions = max_length, loss_rows, extensions
        base = base_of(self.model)
        empty = next((name for name, t in chain(base.named_parameters(), base.named_buffers()) if t.is_meta), None)
        require(empty is None, "model", "weights (from_pretrained maps those of a folder)", f"none in {empty}", ModelError)
        self._untie(base)
        split(base, FIELDS[:1], None)  # refuses other classes
        self._pipeline: Pipeline | None = None
        self._reader: Reader | None = None
        self._run: Stepwise | None = None
        self._packed, self._losses, self._history = deque[Tensor](), deque[float](), list[list[float]]()
        self._given = deque[dict[str, tuple[Tensor, int | None]]]()
        self._states, self._pending, self._count = {}, 0, 0
        self._iterator: Any = None
        self._numbers = numbers(None)
        self._left, self._ended, self._fresh, self._norm = 0, False, True, 0.0
        self._wanted = [False] * len(WANTED)
        self._late: dict[str, Any] = {}

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        """Search as ``Trainer`` does, in one process: the trials of several would differ.

        Raises:
            ConfigError: If there are several processes.
        """
        require(self.world == 1, "hyperparameter_search", "one process", self.world)
        return super().hyperparameter_search(*arguments, **named)

    # ---- Training, in the loop of Trainer

    def train(self, *arguments: Any, **named: Any) -> Any:
        """Train as ``Trainer`` does. Then ``model`` has the trained weights in every process.

        Raises:
            ConfigError: If the checkpoint has another method or other numbers of rows.
            DataError: If there is no such checkpoint.
        """
        check_methods(self, PetraTrainer)
        if self.args.save_strategy != "no":
            check_generation(self.model)
        # Blocks store their inputs instead: two recomputations would be one too many.
        names = [name for name in CHECKPOINTING if hasattr(self.model, name)]
        try:
            with replaced(self.model, **dict.fromkeys(names, lambda *others, **settings: None)):
                result = super().train(*arguments, **named)
        finally:
            self.is_in_train = False
        self.gather_weights()
        if self.args.device.type == "cuda":
            assert self._pipeline is not None
            self._states, self._pipeline = states_of(self._pipeline), None
            self.model.to("cpu")
        else:
            self.optimizer.state.update(states_of(self.pipeline))
        return result

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self._data_seed = all_gather_objects(torch.initial_seed())[0]
        with raise_on_all_ranks():
            loader = self._loader("train_dataset", self.get_train_dataloader) if self.reads else None
        sized: Any = loader if loader is not None and has_length(loader) else None
        mine = (None, 0) if sized is None else (len(sized), super().num_examples(sized))
        length, self._examples = self._same("train_dataset", mine)
        updates = self.args.max_steps > 0 or self.args.num_train_epochs > 0
        expected = "a number > 0, and data with a batch: there would be no update"
        require(updates and length != 0, "num_train_epochs", expected, self.args.num_train_epochs)
        self._train_loader, self._length, self._left, self._ended = loader, length, 0, False
        self._losses.clear()
        self._numbers = numbers(length)
        with ExitStack() as self._in_train:
            self._in_train.enter_context(replaced(self, get_train_dataloader=lambda: self._numbers))
            # the pipeline accumulates in .grad
            self._in_train.enter_context(replaced(self.model, zero_grad=lambda set_to_none=True: None))
            return super()._inner_training_loop(*arguments, **named)

    def _loader(self, name: str, make: Any) -> Any:
        """Return what ``make`` returns. A ValueError or TypeError of data or samplers becomes one line that names the data."""
        state, own = self.args.distributed_state, self.args.process_index
        state.process_index = self.replica  # samplers may ask for it
        try:
            return make()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{name}: {error}") from error
        finally:
            state.process_index = own

    def num_examples(self, dataloader: Any) -> Any:
        """Return the number of rows that a loader reads; in training, that of the first process, which alone reads them."""
        return self._examples if dataloader is self._numbers else super().num_examples(dataloader)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        self._resumed: str | None = None
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        folder = None if self._resumed is None else Path(self._resumed)
        if folder is not None and (folder / OPTIMIZER_NAME).exists() and not (folder / PETRA).exists():
            self._states = read_states(self.optimizer.optimizer, folder / OPTIMIZER_NAME, self._tied)
        self.model.train()
        k, step = self.args.gradient_accumulation_steps, self.state.global_step
        self._number = step
        self._reader = None
        if self.reads:
            path = None if folder is None else folder / self._reader_file
            states = torch.load(path, weights_only=False) if path is not None and path.exists() else None
            per_epoch = max_steps if self._length is None else math.ceil(self._length / k)
            epoch = step // max(per_epoch, 1)
            self._reader = Reader(self._train_loader, self.data_collator, epoch, states, self._of_replicas)
            self.callback_handler.train_dataloader = self._train_loader
        self._build(self._reader, None, max_steps)
        self._in_train.enter_context(without_steps(self.optimizer.optimizer))
        if folder is not None:
            self._restore(folder)
        pipeline = self.pipeline
        pipeline.microbatches_done = step * k
        for worker in pipeline.workers.values():
            worker.microbatches_done = step * k
        self._reads = set(all_gather_objects(reading_events(self.callback_handler.callbacks))[0])
        return model, loader

    def _init_training_state(self, max_steps: int, per_epoch: int, epochs: int, folder: str | None, trial: Any) -> Any:
        """Restore the states of callbacks, such as early stopping. A run that one has stopped stays stopped if none has changed."""
        found: tuple[int, int] = super()._init_training_state(max_steps, per_epoch, epochs, folder, trial)
        self._flos = self.state.total_flos
        if folder is None or self.args.restore_callback_states_from_checkpoint:
            return found
        path = Path(folder) / TRAINER_STATE_NAME
        saved = TrainerState.load_from_json(str(path)) if path.exists() else TrainerState()
        if restore_callbacks(self.callback_handler.callbacks, saved):
            if self.rank == 0:
                print(
                    f"{folder}: a callback stopped this run after update {saved.global_step}; there is nothing to train", flush=True
                )
            return epochs, 0
        return found

    def get_batch_samples(self, epoch_iterator: Iterator[int], num_batches: int, device: torch.device) -> Any:
        """Return the batches of the next update in the first process of a replica, and as many empty ones in others."""
        expected = f"one that calls the one of {PetraTrainer.__name__}"
        require(not (self._at_once and self._packed), "training_step", expected, "another", ModelError)
        self._ended = self._ended and epoch_iterator is self._iterator
        self._iterator = epoch_iterator
        found = [] if self._ended and self._length is None else list(islice(epoch_iterator, num_batches))
        if not self._at_once:
            if not self._left:
                self._start_run(found[0])
            self._left, self._count = self._left - 1, len(found)
            return [{}] * len(found), None
        with raise_on_all_ranks():
            batches = self._read(found) if self.reads else []
        self._count = count = self._same("train_dataset", len(batches))
        self._ended = count < num_batches
        self._given = deque(map(versions, batches))
        return (batches if self.reads else [{}] * count), None

    def _read(self, found: Sequence[int]) -> list[Any]:
        """Read the batches of an update, and pack them."""
        assert self._reader is not None
        k, batches = self.args.gradient_accumulation_steps, self._reader.read(found)
        if self._length is None and 0 < len(batches) < k:
            if self.rank == 0:
                print(f"{len(batches)} batches at the end of an epoch are left out: they are no update", flush=True)
            batches = []
        self.current_gradient_accumulation_steps = len(batches)
        items = self._get_num_items_in_batch(batches, torch.device("cpu"))
        packed: list[Tensor] = []
        for batch in batches:
            parts = self.form.split(batch)
            rows = sum(len(next(iter(part.values()))) for part in parts)
            require(len(parts) == 1, "batch", f"at most {self.form.rows} rows, as in the first one", rows)
            packed.append(self.form.pack(parts[0], items=_number(items), of=len(batches), count=True, step=self._number))
            self.current_flos += 0.0 if self._at_once else float(self.floating_point_ops(batch))  # else counted by the loop
        if packed:
            filler = self.form.pack(self.form.split(batches[-1])[0], items=None, of=1, count=False)
            packed += [filler] * (k - len(packed))
            self._number += 1
        self._packed += packed
        return batches

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of a microbatch. The first of an update trains all of them."""
        same = not self._given or is_unchanged(inputs, self._given.popleft())
        require(same, "training_step", "the inputs of the batch, which the pipeline has read already", "others", ModelError)
        if not self._losses:
            self._advance()
        return torch.tensor(self._losses.popleft(), device=self.args.device)

    def _advance(self) -> None:
        """Train the next update, or with a method that does not flush, all until the next drain."""
        k, reports = self.args.gradient_accumulation_steps, list[Tensor]()
        self.model.train()
        self._fresh, source = self.world == 1, source_of(lambda m: self._packed.popleft(), self.dp)
        self._check_unchanged(late=self.world > 1 and bool(self._history))
        copy_settings(self.optimizer.optimizer, self.pipeline)
        if self._at_once:
            self.pipeline.train(source, k, reports.append if self.reads else None)
            losses = self._means(reports) if self.reads else [0.0] * k
            norms = [worker.update.metrics()["gradient_norm"] for worker in self.pipeline.workers.values()]
            self._norm = sum(norm**2 for norm in norms)
            if self._reads - {*ONLY_AT}:
                self.gather_weights()
        elif self.reads:
            assert self._run is not None
            losses = self._means([self._run.next() for _ in range(k)])
            self._history.append(losses)
            if not self._left:
                self._run.finish()
                all_gather_objects(self._history)
        else:
            if self._pending:
                self.pipeline.train(source, self._pending * k)
                self._pending, self._history = 0, all_gather_objects(None)[0]
            losses = self._history.pop(0)
        self._losses += losses[: self._count]

    def _means(self, reports: Sequence[Tensor]) -> list[float]:
        """Return the share of each microbatch of an update in its loss, from the reports of a replica: means over replicas."""
        own = [float(report[1]) / self.dp / self.args.gradient_accumulation_steps for report in reports]
        return [sum(each) / self.dp for each in zip(*self._of_replicas(own), strict=True)]

    def _start_run(self, first: int) -> None:
        """Begin to train all updates until the pipeline drains, the first batch of which has the number ``first``."""
        args, state, k = self.args, self.state, self.args.gradient_accumulation_steps
        per_epoch = sys.maxsize if self._length is None else math.ceil(self._length / k)
        due = [(args.eval_strategy, state.eval_steps), (args.save_strategy, state.save_steps)]
        every = [int(steps) for strategy, steps in due if strategy == "steps"]
        step = state.global_step
        ends = [state.max_steps - step, per_epoch - first // k, *(n - step % n for n in every)]
        self._left = self._pending = updates = min(ends)
        self._history = []
        if not self.reads:
            return
        starts = iter(range(first, sys.maxsize, k))

        def read(m: int) -> Tensor:
            nonlocal starts
            while not self._packed:
                start = next(starts)
                batches = self._read(range(start, min(start + k, self._length or sys.maxsize)))
                if not batches:
                    require(start > 0, "train_dataset", "rows for an update in each epoch", "too few")
                    starts = iter(range(0, sys.maxsize, k))
            return self._packed.popleft()

        self._run = Stepwise(lambda give: self.pipeline.train(source_of(read, self.dp), updates * k, give), args.device)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the pipeline clips."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return self._norm if self._at_once else None

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *arguments: Any, **named: Any) -> None:
        """Let all processes do what a callback of one has asked for, once the pipeline is drained."""
        own = [a or b for a, b in zip(self._asked_for(), self._wanted, strict=True)]
        if self._at_once or not self._left:
            seen, norm = int(self.state.num_input_tokens_seen), self._norm if grad_norm is not None else 0.0
            flos = self.state.total_flos + self.current_flos - self._flos
            gathered = all_gather_objects((own, float(tr_loss), norm, seen, flos, self.control.should_log))
            self._ask_for(flags for flags, *_ in gathered)
            self.state.num_input_tokens_seen = gathered[0][3]  # of the process that reads
            self._flos += sum(each[4] for each in gathered[:: self.world // self.dp])  # of all that read
            self.current_flos = self._flos - self.state.total_flos
            self.control.should_log = any(each[-1] for each in gathered)
            self._logs_of_all = self.control.should_log and self.state.global_step > self._globalstep_last_logged
            tr_loss.fill_(gathered[0][1])
            grad_norm = None if grad_norm is None else math.sqrt(sum(each[2] for each in gathered) / self.dp)
            self._wanted = [False] * len(WANTED)
            if any(getattr(self.control, ONLY_AT[event]) if event in ONLY_AT else not self._at_once for event in self._reads):
                self.gather_weights()
        else:
            if any(own) and not any(self._wanted):
                step = self.state.global_step
                print(f"asked for in a callback at update {step}: at the next drain, {self._left} later", flush=True)
            self._wanted = own
            self._ask_for([])
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *arguments, **named)

    def _evaluate(self, *arguments: Any, **named: Any) -> Any:
        metrics = super()._evaluate(*arguments, **named)
        if self.is_in_train:  # events of the evaluation may have asked for something
            self._ask_for(all_gather_objects(self._asked_for()))
        return metrics

    def _asked_for(self) -> list[bool]:
        """Return which of :data:`WANTED` the callbacks of this process have asked for."""
        return [bool(getattr(self.control, name)) for name in WANTED]

    def _ask_for(self, wanted: Iterable[Sequence[bool]]) -> None:
        """Let this process do what any of several processes has asked for, and nothing else."""
        for name, *each in zip(WANTED, *wanted, strict=True):
            setattr(self.control, name, any(each))

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        self.gather_weights()  # for callbacks at the end
        self._logs_of_all = True  # it logs next
        return super()._finalize_training(*arguments, **named)

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """Log, with what a subclass has added in the process of the last stage, where ``compute_loss`` is called."""
        if self._logs_of_all and self.world > 1:
            self._logs_of_all = False
            found = all_gather_objects({**self._late, **logs})[self._last]
            logs |= {key: found[key] for key in found.keys() - logs.keys()}  # its caller returns it
            self._late = {}
        elif self.world > 1 and self.rank == self._last:  # alone, in compute_loss or before the others: comes with the next ones
            self._late |= logs
        super().log(logs, *arguments, **named)

    # ---- Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained model as ``Trainer`` does. In training, every process must call this method; the first writes."""
        check_generation(self.model)
        self.gather_weights()
        if self.rank == 0:
            with shared(base_of(self.model)) if self._added else nullcontext():
                super().save_model(output_dir, _internal_call)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Return the number of FLOPs that ``Trainer`` counts for a batch."""
        with shared(base_of(self.model), equal=False) if self._added else nullcontext():  # others' weights may be old here
            return super().floating_point_ops(inputs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the states of all stages as the file of ``Trainer``, and of the pipeline if they are more than that."""
        whole = self.optimizer.optimizer
        states = gather_states(whole, self.pipeline)
        with replaced(whole, state=defaultdict(dict, states)), without(whole, self._tied[1:]):
            super()._save_optimizer_and_scheduler(output_dir)
        if self._exports_all:
            return
        Checkpoints(Path(output_dir) / PETRA, keep=1).save(self.pipeline, self._facts)

    @property
    def _facts(self) -> dict[str, Any]:
        """What must not differ between a run and the one that resumes it."""
        names = ("gradient_accumulation_steps", "per_device_train_batch_size")
        # without addresses of functions in settings, which differ in another run
        extensions = re.sub(r" at 0x\w+", "", ", ".join(map(repr, self._extensions))) or "none"
        found = {name: getattr(self.args, name) for name in names}
        return found | {"method": self.pipeline.plan.method.name, "extensions": extensions}

    @property
    def _exports_all(self) -> bool:
        return self._at_once and not self._extensions

    def _save_rng_state(self, output_dir: str) -> None:
        if self.rank == 0:
            super()._save_rng_state(output_dir)
        if self._reader is not None:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self._reader.states(), os.path.join(output_dir, self._reader_file))

    @property
    def _reader_file(self) -> str:
        return READER if not self.replica else f"{self.replica}_{READER}"

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        # No process reads it before it is complete, and all know the best one: others than the first look before it is written.
        self.state.best_model_checkpoint = all_gather_objects(self.state.best_model_checkpoint)[0]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: the reader restores the state at the right batch."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._resumed = checkpoint

    def _restore(self, folder: Path) -> None:
        """Resume from a checkpoint of this class or of ``Trainer``."""
        expected = f"a folder that PetraTrainer has saved, with {PETRA}/ or {OPTIMIZER_NAME}"
        path = newest(folder / PETRA)
        require(path is not None or (folder / OPTIMIZER_NAME).exists(), "resume_from_checkpoint", expected, folder)
        if path is not None:
            facts = facts_of(path)
            for name, value in self._facts.items():  # older checkpoints tell no extensions
                found = facts.get(name, value)
                require(found == value, name, f"{found}, as in {folder}", value)
            restore(self.pipeline, path)
        if (folder / SCHEDULER_NAME).exists():
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
            rates = getattr(self.lr_scheduler, "_last_lr", None) or [group["lr"] for group in self.optimizer.param_groups]
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        super()._issue_warnings_after_load(with_all_weights(self.model, load_result, untied=self._added > 0))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
