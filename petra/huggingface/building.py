"""A ``Trainer`` with a pipeline: how the model, the arguments and the data become one, and the loss on its last stage."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import nested_concat
from transformers.trainer_utils import has_length

from petra.distributed import all_gather_objects, raise_on_all_ranks
from petra.engine.endpoints import Losses
from petra.engine.options.extension import Extension
from petra.engine.options.outer_step import OuterStep
from petra.engine.recipe import Recipe
from petra.errors import DataError, ModelError, require
from petra.huggingface.blocks import Head, kind_of, split
from petra.huggingface.feed import (
    Ahead,
    Entry,
    Exit,
    Form,
    Reader,
    begins_again,
    is_indexed,
    longest_batch,
    random_states,
    set_random_states,
)
from petra.huggingface.forecast import forecast
from petra.huggingface.inputs import FIELDS
from petra.huggingface.load import base_of, built, report_untied, untie
from petra.huggingface.losses import Chunked, OfLogits, check_chunks
from petra.huggingface.optimizers import settings_of, stage_optimizer, states_of
from petra.huggingface.outputs import answering, check_called
from petra.huggingface.ties import TiedWeights
from petra.method import Method
from petra.model import BlockSpec, Model
from petra.models.head_loss import LinearCrossEntropy, without_logits
from petra.pipeline import Pipeline
from petra.plan import make_plan
from petra.settings import Numerics, Runtime
from petra.update_rules import UpdateRules

CHUNK = 256
"""Number of tokens of which TRL computes logits at once."""


class Pipelined(transformers.Trainer):  # type: ignore[misc]
    """Base class of :class:`petra.huggingface.PetraTrainer`: the pipeline and its loss."""

    _method: Method
    _stages: int | Sequence[int]
    _max_length: int | None
    _loss_rows: int | None
    _extensions: Sequence[Extension]
    form: Form
    rank: int
    world: int
    dp: int
    replica: int
    reads: bool
    _peers: Any
    _data_seed: int | None = None
    _pipeline: Pipeline | None
    _fresh: bool
    _flos: float
    current_flos: float
    state: Any
    _evaluation: Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
    _states: dict[Tensor, dict[str, Any]]
    _remainder: int | None = None
    _last: int = 0
    _added: int = 0
    _logs_of_all: bool = False
    _chunks: LinearCrossEntropy | None = None
    _begun: Sequence[Ahead] = ()
    _fixed: tuple[int, float | None] = (0, None)
    _settings: list[dict[str, Any]]

    def _alone(self) -> None:
        """Let ``transformers`` and ``accelerate`` take the processes of a replica for one, and the replicas for all of them."""
        args, accelerator = self.args, self.accelerator
        for owner, name in ((args, "distributed_state"), (accelerator, "state")):
            alone = copy.copy(getattr(owner, name))
            alone.__dict__ = {**alone.__dict__, "distributed_type": DistributedType.NO, "num_processes": self.dp}
            setattr(owner, name, alone)
        config = accelerator.dataloader_config
        prepare = partial(
            prepare_data_loader,
            num_processes=self.dp,
            process_index=self.replica,
            split_batches=config.split_batches,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
        )

        def prepared(*objects: Any) -> Any:
            found = list(objects)
            for i, each in enumerate(objects):
                if isinstance(each, nn.Module):
                    accelerator._models.append(each)  # evaluation reads whether there are any
                elif isinstance(each, DataLoader):
                    own = self.dp == 1 or config.data_seed is not None
                    found[i] = prepare(each, data_seed=config.data_seed if own else self._data_seed)
                elif isinstance(each, torch.optim.Optimizer) and not isinstance(each, AcceleratedOptimizer):
                    found[i] = AcceleratedOptimizer(each, device_placement=False)
            return found if len(found) > 1 else found[0]

        accelerator.prepare, accelerator.prepare_model = prepared, lambda model, *others, **named: prepared(model)
        accelerator.gather = self._gathered
        accelerator.reduce = partial(recursively_apply, self._reduced)
        accelerator.pad_across_processes = partial(recursively_apply, self._padded)
        accelerator.gather_for_metrics = partial(recursively_apply, self._of_rows)
        self.gather_function = accelerator.gather_for_metrics

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, at the start and for each trial of a search."""
        super().create_accelerator_and_postprocess()
        if "_pipeline" in self.__dict__:  # not in the constructor of Trainer
            self._alone()

    def call_model_init(self, trial: Any = None) -> Any:
        """Return a new model, whose embedding and head have weights of their own before it gets an optimizer."""
        model = super().call_model_init(trial)
        self._untie(base_of(model))
        return model

    def _of_replicas(self, value: Any) -> list[Any]:
        """Return a value of all replicas. The processes with one stage, of all replicas, must call this method."""
        if self.dp == 1:
            return [value]
        found: list[Any] = [None] * self.dp
        dist.all_gather_object(found, value, self._peers)
        return found

    def _same(self, name: str, value: Any) -> Any:
        """Return a value of the processes that read data, in all processes, which call this method.

        Raises:
            DataError: If replicas have different ones.
        """
        found = all_gather_objects(value)[:: self.world // self.dp]
        require(found.count(found[0]) == self.dp, name, "the same length in all replicas", " and ".join(map(str, found)), DataError)
        return found[0]

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the rows of all replicas, padded to the longest."""
        if self.dp == 1:
            return tensor
        found: Tensor = reduce(nested_concat, map(torch.atleast_1d, self._of_replicas(tensor.cpu())))
        return found.to(tensor.device)

    def _reduced(self, tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        """Return the sum, the mean or the largest of the tensors of all replicas."""
        if self.dp == 1:
            return tensor
        found = torch.stack(self._of_replicas(tensor.cpu()))
        whole = found.amax(0) if reduction == "max" else found.sum(0)
        return (whole / self.dp if reduction == "mean" else whole).to(tensor.device)

    def _padded(self, tensor: Tensor, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Tensor:
        """Return a tensor with the length of the longest of all replicas."""
        if self.dp == 1 or not -tensor.dim() <= dim < tensor.dim():
            return tensor
        shape = [*tensor.shape]
        shape[dim] = max(self._of_replicas(shape[dim])) - shape[dim]
        padding = tensor.new_full(shape, pad_index)
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)

    def _of_rows(self, tensor: Tensor) -> Tensor:
        """Return what belongs to rows of the data, without the repeated ones of a last batch."""
        found = self._gathered(tensor)
        return found[: self._remainder] if found.dim() else found

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the pipeline moves the blocks of its stages."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return the inputs of a loss, which are on the device. A copy would not be what the pipeline has read."""
        return inputs

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline. It is built when training or evaluation needs it. Every process must read it."""
        if self._pipeline is None:
            self._build(None, None)
        assert self._pipeline is not None
        return self._pipeline

    def _build(self, reader: Reader | None, evaluated: Ahead | None, steps: int = 0) -> None:
        """Build the pipeline from the model and the settings as they are now.

        Args:
            reader: Reader of the data for training, in the first process; None without training.
            evaluated: Loader of data for evaluation; None for those of the data sets of this trainer.
            steps: Number of updates of the training.
        """
        args, base = self.args, base_of(self.model)
        self._untie(base)
        with raise_on_all_ranks():
            form = self._form(reader, evaluated) if self.rank == 0 else None
        self.form: Form = all_gather_objects(form)[0]
        parts = split(base, FIELDS[:1] if self.form.size is None else self.form.fields, None)
        check_called(self.model, base, parts)
        model, losses = self._blocks(base, parts)
        plan = make_plan(
            model,
            self.form.spec_of(self.dp),
            method=self._method,
            k=args.gradient_accumulation_steps,
            stages=self._stages,
            processes=self.world,
            dp=self.dp,
            numerics=Numerics(self._autocast),
            device_type=args.device.type,
            metrics=0,
        )
        self._settings = []
        self._fixed = args.gradient_accumulation_steps, args.max_grad_norm
        self._at_once = plan.method.flush or not any(plan.delays)
        tokens = args.include_num_input_tokens_seen  # batches are read ahead of what is counted
        require(self._at_once or tokens in ("no", False), "include_num_input_tokens_seen", "no, without flush", tokens)
        ties = self._ties(base) if steps else ()
        for extension in self._extensions if steps else ():
            extension.check_length(steps)
        clip = args.max_grad_norm or 0
        most = clip or (sys.float_info.max if ties else None)
        if clip and not self._at_once and len(plan.stages) > 1 and self.rank == 0:
            print(f"max_grad_norm={clip} of each stage: with {plan.method.name} they update apart", flush=True)
        self._states = {**({} if self._pipeline is None else states_of(self._pipeline)), **self._states}
        whole = self.optimizer.optimizer if steps else None  # inside what accelerate wraps around it
        recipe = Recipe(
            _unused if whole is None else partial(stage_optimizer, whole, self._states),
            None if self._at_once or not steps else self._rates(steps),
            losses,
            metrics={},
            seed=args.seed,
            rules=UpdateRules(clip=most, clip_globally=self._at_once and most is not None),
            extensions=(*self._extensions, *ties) if steps else (),
        )
        if whole is not None and self.rank == 0:
            print(forecast(plan, recipe, whole, args.device.type, self._chunks), flush=True)
        self._pipeline = Pipeline.from_plan(plan, recipe, Runtime(args.device))
        self._states = self._states if not steps else {}
        processes = plan.layout.processes
        last = next(p for p, owned in enumerate(processes) if len(plan.stages) - 1 in owned)
        self._last = self.replica * len(processes) + last

    def _untie(self, base: Any) -> None:
        """Give an embedding and a head that share their weights one each. They count as tied until they are trained apart."""
        marked = getattr(getattr(base, "config", None), "tie_word_embeddings", False)
        added = untie(base)
        optimizer = self.__dict__.get("optimizer")
        if added and optimizer is not None:  # made before
            shared, own = base.get_input_embeddings().weight, base.get_output_embeddings().weight
            for group in optimizer.param_groups:
                group["params"] += [own for p in group["params"] if p is shared]
            if shared in optimizer.state:
                optimizer.state[own] = copy.deepcopy(optimizer.state[shared])
        if marked and not added and not self._added and base.get_output_embeddings() is not None:
            # an earlier trainer has given them one each
            pair = base.get_input_embeddings().weight, base.get_output_embeddings().weight
            added = pair[0].numel() if torch.equal(*pair) else 0
        self._added = added or self._added
        if self._added:
            base.config.tie_word_embeddings = True

    @property
    def _tied(self) -> tuple[nn.Parameter, ...]:
        """The weights of an embedding and a head that count as tied."""
        base = base_of(self.model)
        return (base.get_input_embeddings().weight, base.get_output_embeddings().weight) if self._added else ()

    def _ties(self, base: Any) -> tuple[TiedWeights, ...]:
        """Return what keeps an embedding and a head equal that shared weights. Say so if gradients are late, and they aren't."""
        tied = self._tied
        if not any(p.requires_grad for p in tied):
            return ()
        if not self._at_once or not all(p.requires_grad for p in tied):
            report_untied(self._added)
            self._added, base.config.tie_word_embeddings = 0, False
            return ()
        require(torch.equal(*tied), "model, head", "the weights of the embedding, which it shares", "others", ModelError)
        for each in self._extensions:
            if isinstance(each, OuterStep):  # the weights are in two stages, at different places among their numbers
                expected = "with an embedding and a head that share their weights"
                require(not each.staggered, "outer.staggered", f"false {expected}", "true")
                require(each.format != "int8", "outer.format", f"null or bf16 {expected}", "int8")
        named = {id(p): f"{block}.{key}" for block, part in self._parts.items() for key, p in part.named_parameters()}
        return (TiedWeights(*(named[id(p)] for p in tied)),)

    def _blocks(self, base: Any, parts: dict[str, nn.Module]) -> tuple[Model, Losses]:
        """Return the model of a pipeline, whose modules and parameters are those of ``base``, and its losses."""
        args, names = self.args, list(parts)
        head = parts[names[-1]]
        losses = Losses(OfLogits(self._training_loss), OfLogits(self._evaluation))
        if isinstance(head, Head) and self._loss_rows is None:
            head.scale = None  # that of the model's own forward
        if self._loss_rows is not None or self._of_states:
            kept = {id(t): t for t in (*head.parameters(), *head.buffers())}
            parts[names[-1]] = copy.deepcopy(head, kept)
        parts[names[0]] = Entry(parts[names[0]], self.form)
        specs = [BlockSpec(name, partial(built, part)) for name, part in parts.items()]
        model = Model(type(base).__name__, tuple(specs))
        if self._loss_rows is not None:
            check_chunks(self, self._loss_rows, own=self._own_loss)
            model = without_logits(model)
            chunks = LinearCrossEntropy(args.label_smoothing_factor, self._loss_rows, self._autocast)
            losses = Losses(*(Chunked(self, chunks, training=training) for training in (True, False)))
            self._chunks = chunks
        elif self._of_states:
            plain = type(getattr(base, "lm_head", None)) is torch.nn.Linear
            require(plain, "loss_type", "another one than chunked_nll, with this head (nll)", self.args.loss_type)
            model = without_logits(model)
            self._chunks = LinearCrossEntropy(0.0, CHUNK, self._autocast)
        *others, last = model.blocks
        model = replace(model, blocks=(*others, BlockSpec(last.name, partial(_exit, last))))
        self._parts = {**parts, names[-1]: Exit(parts[names[-1]])}
        return model, losses

    @property
    def _autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.args.bf16 else None

    @property
    def _of_states(self) -> bool:
        """Whether the loss reads hidden states and the weights of the head, as the default of ``SFTConfig`` does."""
        return getattr(self.args, "loss_type", None) == "chunked_nll"

    @property
    def _own_loss(self) -> bool:
        """Whether the loss or a prediction is not that of ``Trainer`` and the model: it may read images, and needs logits."""
        base, names = base_of(self.model), ("compute_loss", "prediction_step")
        methods = any(n in vars(self) or getattr(type(self), n) is not getattr(transformers.Trainer, n) for n in names)
        replaced = any("forward" in vars(each) for each in (base, self.model)) or "_loss_function" in vars(base)
        return methods or replaced or self.compute_loss_func is not None or "inputs" in self.args.include_for_metrics

    def _form(self, reader: Reader | None, evaluated: Ahead | None) -> Form:
        """Return the form of microbatches, in the first process: that of the longest rows of all data."""
        base, states = base_of(self.model), random_states(self.data_collator)
        config, name = base.config, type(base).__name__
        vocabulary = getattr(config, "vocab_size", None)
        aheads = [] if reader is None else [reader.begin()]
        if evaluated is not None:
            aheads.append(evaluated)
        elif self.eval_dataset is not None:
            sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {None: self.eval_dataset}
            aheads += [self._ahead(self.get_eval_dataloader(key)) for key, data in sets.items() if not_empty(data)]
        if not aheads and self.train_dataset is not None:
            aheads.append(self._ahead(self.get_train_dataloader()))
        require(bool(aheads), "train_dataset", "a data set with a length > 0", "none")
        forms = []
        for each in aheads:
            loader = each.loader
            rows = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
            rows = rows or self.args.per_device_train_batch_size
            batch = longest_batch(each, rows, vocabulary, known=self._max_length is not None)
            bidirectional = kind_of(base) == "bert"
            size = self._size(loader, batch, rows)
            forms.append(Form.of(batch, size, vocabulary, whole=self._own_loss, bidirectional=bidirectional))
        if evaluated is None:
            self._begun = [each for each in aheads[reader is not None :] if not begins_again(each.loader)]
            for each in self._begun:
                each.states = None
        set_random_states(self.data_collator, states)
        form = forms[0].joined(forms[1:])
        positions = getattr(config, "max_position_embeddings", None) if name.startswith(("Bert", "GPT2")) else None
        fits = form.size is None or positions is None or form.size <= positions
        require(fits, "max_length", f"at most {positions}, the positions of the model", form.size)
        return form

    def _size(self, loader: Any, batch: Any, rows: int) -> int | None:
        """Return the number of tokens of a row, which arguments may bound if data can't be indexed; None: those of the batch."""
        most: int | None = getattr(self.args, "max_length", None)
        if self._max_length is not None or most is None or is_indexed(loader) or FIELDS[0] not in batch:
            return self._max_length
        found: Sequence[int] = batch[FIELDS[0]].shape  # a single row has the tokens of all rows, if those are packed
        return max(found[-1], most * rows if found[0] < rows else most)

    def _ahead(self, loader: Any) -> Ahead:
        """Return a loader, with the batch of its data that has been read for the form of microbatches, and not been used yet."""
        data = getattr(loader, "dataset", loader)
        found = next((each for each in self._begun if getattr(each.loader, "dataset", each.loader) is data), None)
        self._begun = [each for each in self._begun if each is not found]
        return found or Ahead(loader, self.data_collator)

    def _rates(self, steps: int) -> Any:
        """Return the learning rate as a function of the microbatches that a stage has done, as stages update at different times."""
        schedule, k = self.lr_scheduler, self.args.gradient_accumulation_steps
        known = type(schedule) is LambdaLR and len({*schedule.base_lrs}) == len({*map(id, schedule.lr_lambdas)}) == 1
        expected = "one that flushes, or a learning rate that is a function of the update (LambdaLR), the same in all groups"
        require(known, "method", expected, self._method.name)
        return lambda t: schedule.base_lrs[0] * schedule.lr_lambdas[0](min((max(t, 1) - 1) // k, steps - 1))

    def _check_unchanged(self, *, late: bool) -> None:
        """Check that callbacks have changed nothing that a pipeline could not follow.

        Args:
            late: Whether other processes trained this update before their callbacks could change it.

        Raises:
            ConfigError: If they have. The message names it.
        """
        whole, now = self.optimizer.optimizer, (self.args.gradient_accumulation_steps, self.args.max_grad_norm)
        expected, got = ("gradient_accumulation_steps={}, max_grad_norm={}".format(*each) for each in (self._fixed, now))
        require(now == self._fixed, "callback", f"one that leaves {expected}", got)
        before, self._settings = self._settings, settings_of(whole)
        rates = self._at_once or [group["lr"] for group in whole.param_groups] == self.lr_scheduler.get_last_lr()
        require(rates, "method", "one that flushes, where a callback sets learning rates", self._method.name)
        expected = "one that flushes, where a callback changes settings of the optimizer"
        require(not late or before == self._settings, "method", expected, self._method.name)

    def gather_weights(self) -> None:
        """Give ``model`` the trained weights in every process. Every process must call this method.

        A process sends the weights of its stages to all others: with W processes, the whole model over each link. In one
        process, the model always has them.
        """
        pipeline = self._pipeline
        if self._fresh or pipeline is None:
            return
        layout, names = pipeline.plan.layout, [block.name for block in pipeline.plan.model.blocks]
        own = dict(pipeline.blocks())
        for process, stages in enumerate(layout.processes if self.world > 1 else ()):
            for name in (names[block] for j in stages for block in layout.stages[j]):
                part = self._parts[name].state_dict()
                theirs = own[name].state_dict() if name in own else {}
                for key, tensor in part.items():
                    value = (theirs.get(key, tensor)).detach().to("cpu").contiguous()
                    dist.broadcast(value, process)
                    if name not in own:
                        tensor.copy_(value)
        self._fresh = True

    def outputs_of(self, logits: Tensor, side: Tensor) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
        """Return the batch, the facts, and the logits of its rows and tokens."""
        batch, facts = self.form.unpack(side)
        tokens = self.form.size is not None and len(logits) == self.form.rows * self.form.size
        if tokens:
            rows, length = batch[FIELDS[0]].shape
            return batch, facts, logits.view(self.form.rows, self.form.size or 0, -1)[:rows, :length].contiguous()
        return batch, facts, logits[: len(next(iter(batch.values())))]

    def _training_loss(self, found: Tensor, side: Tensor, weights: Sequence[Tensor]) -> Tensor:
        batch, facts, logits = self.outputs_of(found, side)
        if not facts["count"]:
            return sum(t.sum() * 0 for t in (found, *weights))  # type: ignore[return-value]
        self.current_gradient_accumulation_steps = facts["of"]
        items = None if facts["items"] is None else torch.tensor(facts["items"], device=logits.device)
        own = weights if self._of_states else None
        step, self.state.global_step = self.state.global_step, facts["step"]
        with answering(base_of(self.model), batch, logits, own, self._autocast), self.compute_loss_context_manager():
            loss = self.compute_loss(self.model, batch, num_items_in_batch=items)
        self.state.global_step = step
        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        whole: Tensor = loss * self.args.gradient_accumulation_steps / (1 if scaled else facts["of"])
        return whole


def _exit(last: BlockSpec) -> nn.Module:
    return Exit(last.build())


def _unused(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.0)


def not_empty(data: Any) -> bool:
    return not has_length(data) or len(data) > 0
