"""A model of ``transformers``, or its checkpoint, as a :class:`petra.Model` of one block per layer, and the way back."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging

from petra.errors import ConfigError, Count, ModelError, first_line, invalid, require
from petra.huggingface.blocks import split
from petra.huggingface.coupling import Momentum, coupled
from petra.huggingface.inputs import FIELDS, row_names
from petra.model import BlockSpec, Model, copied
from petra.reversible import seeded

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja", "spiece.model")
"""Files of a checkpoint that are copied, so that the new one has the tokenizer of the old one."""


def huggingface(
    path: Path, classes: int = 256, size: int = 256, delimiter: Annotated[int | None, ">= 0"] = None, lora: Count | None = None
) -> Model:
    """Return the causal language model in the folder of a checkpoint, in float32, for ``petra train model=huggingface``.

    Args:
        path: Folder of the checkpoint.
        classes: Number of different tokens, at most the checkpoint's.
        size: Number of tokens in a row.
        delimiter: Token with which every document begins. Positions then attend to their own document only. None: a text is one
            document.
        lora: null: all weights are trained; or the rank of LoRA adapters of all linear layers except the head, which are then
            trained alone.

    Raises:
        ConfigError: If the checkpoint can't be read, or has fewer tokens or positions.
        ModelError: If it is no causal language model that is supported.
    """
    model = loaded(path)
    most = getattr(model.config, "max_position_embeddings", size)
    require(hasattr(model, "lm_head"), "model.path", "a causal language model", f"{path} ({type(model).__name__})", ModelError)
    known = model.config.vocab_size
    require(classes <= known, "data.classes", f"at most {known}, the tokens of {path}", classes)
    require(size <= most, "data.size", f"at most {most}, the positions of {path}", size)
    return from_pretrained(model if lora is None else adapted(model, lora), delimiter=delimiter, dtype=torch.float32)


def adapted(model: Any, rank: int) -> Any:
    """Return the model with LoRA adapters (``peft``) of all linear layers except the head, the same in every process."""
    from peft import LoraConfig, get_peft_model

    with seeded(0):
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def from_pretrained(
    source: str | Path | Any,
    *,
    fields: Sequence[str] = FIELDS[:1],
    delimiter: int | None = None,
    dtype: torch.dtype | None = None,
    coupling: Momentum | None = None,
) -> Model:
    """Return a model of one block for the embedding, one for each layer, and one for the head, with pre-trained weights.

    Input and output of the model:

    =================================  ================================================  ========================================
    model                              inputs (:func:`petra.huggingface.stack`)          output
    =================================  ================================================  ========================================
    decoders, GPT-2, BertForMaskedLM   int64 (B, T), or (B, fields, T) of several        logits (B·T, vocabulary)
    BertForSequenceClassification      the same                                          logits (B, labels)
    ViTForImageClassification          images (B, channels, height, width)               logits (B, labels)
    =================================  ================================================  ========================================

    Every process calls this function. The weights of a folder are mapped from its files, and a process copies those of its own
    stages only. The modules in the blocks are those of ``transformers``; a model that is passed keeps its own weights.
    If embedding and head share weights, they are trained apart, because they are in different stages, and a line says so.
    Parameters that are frozen (``requires_grad=False``), as ``peft`` does it, stay frozen.

    Args:
        source: Folder of a checkpoint, or a model of ``transformers`` or ``peft``, which is put into training mode.
        fields: Names of the rows of the inputs: ``input_ids``, and ``attention_mask`` for padded rows, ``position_ids`` for packed
            documents, ``token_type_ids`` for BERT.
        delimiter: Token with which every document begins. Positions then restart there, and attend to their own document only.
            None: a row is one document.
        dtype: Type of the weights. None: that of a model that is passed, and float32 for a folder.
        coupling: Makes the first layers reversible. The network is then another one, and its loss has to be tuned.

    Raises:
        ConfigError: If the checkpoint can't be read, or needs code of its own (``trust_remote_code``).
        ModelError: If the class of the model is not supported, or its weights have few bits.
    """
    named = isinstance(source, str | os.PathLike)
    rows, model = row_names(fields), base_of(loaded(source) if named else source)
    few = next((p.dtype for p in model.parameters() if not p.is_floating_point()), None)
    require(few is None, "model", "floating-point weights (PetraTrainer trains adapters of others)", few, ModelError)
    parts = split(model.train(), rows, delimiter)
    uses = Counter(chain(*(part.parameters() for part in parts.values())))
    report_untied(sum((count - 1) * p.numel() for p, count in uses.items()))
    parts = parts if coupling is None else coupled(parts, coupling)
    dtype = torch.float32 if named and dtype is None else dtype
    return Model(type(model).__name__, tuple(BlockSpec(name, partial(_built, part, dtype)) for name, part in parts.items()))


def loaded(path: str | os.PathLike[str]) -> Any:
    """Return the model in the folder of a checkpoint, with the type of its files, in training mode.

    Weights that the checkpoint lacks are random, and equal in every process.

    Raises:
        ConfigError: If it can't be read, or needs code of its own.
    """
    present = Path(path, "config.json").is_file()
    require(present, str(path), "the folder of a checkpoint (hf download NAME --local-dir FOLDER)", "no config.json")
    with quiet(path):
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    require(not getattr(config, "auto_map", None), str(path), "a model of transformers (no trust_remote_code)", "code of its own")
    name = next(iter(config.architectures or ()), "none")
    kind: Any = getattr(transformers, name, None)
    require(kind is not None, f"{path}, architectures", "a class of transformers, such as LlamaForCausalLM", name)
    with quiet(path), seeded(0):
        found, report = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
    for key, line in (("missing_keys", "has no {}: random weights"), ("unexpected_keys", "has {}, which {} does not use")):
        if (names := sorted(report[key])) and _first_process():
            print(f"{path} {line.format(', '.join(names[:8]) + ', …' * (len(names) > 8), name)}", file=sys.stderr)
    return found.train()


def save_pretrained(source: str | Path | Any, state: Mapping[str, Tensor], folder: str | Path, lora: int | None = None) -> None:
    """Write trained weights as a checkpoint that ``from_pretrained`` of ``transformers`` loads.

    Embedding and head are written apart, with ``tie_word_embeddings=false``. Adapters are added to the weights that they adapt.
    Layers with a coupling are written without it.

    Args:
        source: What :func:`petra.huggingface.from_pretrained` was given: a folder, whose tokenizer is copied, or a model, which
            gets the weights.
        state: Weights of the whole network by ``<block>.<name>``, in its shapes (:meth:`petra.Pipeline.state_dict` of all ranks).
        folder: Folder of the new checkpoint, new or empty.
        lora: Rank of the adapters of :func:`petra.huggingface.load.huggingface`, or None.

    Raises:
        ConfigError: If ``folder`` has files, or ``source`` can't be read.
        ModelError: If the weights are those of another model.
    """
    out = Path(folder)
    require(not (out.exists() and any(out.iterdir())), str(out), "a new or empty folder", "one with files")
    named = isinstance(source, str | Path)
    whole: Any = loaded(source) if named else source
    whole = whole if lora is None else adapted(whole, lora)
    model = base_of(whole)
    untie(model)
    blocks, given = split(model, FIELDS[:1], None), {key.partition(".")[0] for key in state}
    require(given == blocks.keys(), "state", f"weights of the blocks {', '.join(blocks)}", ", ".join(sorted(given)), ModelError)
    require(not any(bool(t.isnan().any()) for t in state.values()), "state", "numbers", "NaN", ModelError)
    model.to(reduce(torch.promote_types, (t.dtype for t in state.values())))  # adapters are merged in this type
    for name, block in blocks.items():
        own = {key.removeprefix(f"{name}."): t for key, t in state.items() if key.startswith(f"{name}.")}
        own = {key.removeprefix("f.").removeprefix("block."): t for key, t in own.items()}  # of a coupling
        try:
            block.load_state_dict(own)
        except RuntimeError as error:
            raise ModelError(f"block {name} does not fit {type(model).__name__} ({first_line(error)})") from error
    model.config.dtype = next(model.parameters()).dtype
    with quiet(out):
        (whole.merge_and_unload() if whole is not model else model).save_pretrained(out)
    for file in (file for pattern in TOKENIZER for file in Path(source).glob(pattern)) if named else ():
        shutil.copyfile(file, out / file.name)


def untie(model: Any) -> int:
    """Give the head weights of its own, record it in the model's configuration, and return how many parameters this adds."""
    require(hasattr(model, "get_input_embeddings"), "model", "a model of transformers", type(model).__name__, ModelError)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if tied:
        _layer(head).weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    if head is not None:
        model.config.tie_word_embeddings = False
    return head.weight.numel() if tied else 0


@contextmanager
def shared(model: Any, *, equal: bool = True) -> Iterator[None]:
    """Let the head share the weights of the embedding inside the ``with`` block.

    Raises:
        ModelError: If they differ, and ``equal`` is true.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own = head.weight
    same = not equal or torch.equal(own, embedding.weight)
    require(same, "lm_head", "the weights of the embedding", "others", ModelError)
    _layer(head).weight = embedding.weight
    try:
        yield
    finally:
        _layer(head).weight = own


def _layer(layer: Any) -> Any:
    """Return the layer inside its adapters."""
    return _layer(layer.base_layer) if hasattr(layer, "base_layer") else layer


@contextmanager
def quiet(path: object) -> Iterator[None]:
    """Refuse in one line what can't be read or written, without progress bars and reports of ``transformers``."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise invalid(str(path), "the folder of a checkpoint of transformers", first_line(error), ConfigError) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def base_of(model: Any) -> Any:
    """Return the model of ``transformers`` inside one of ``peft``, whose adapters must not be merged; any other model as it is."""
    merged = hasattr(model, "get_base_model") and any(getattr(module, "merged", False) for module in model.modules())
    require(not merged, "model", "adapters that are trained (unmerge_adapter)", "merged ones", ModelError)
    for config in getattr(model, "peft_config", {}).values() if hasattr(model, "get_base_model") else ():
        method = getattr(config.peft_type, "value", str(config.peft_type))
        adds = not config.is_prompt_learning and method != "ADALORA"
        require(adds, "model", "adapters in layers, whose loss is that of the model, such as LoRA", method, ModelError)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def report_untied(added: int) -> None:
    """Print, in the first process only, how many parameters were added because embedding and head shared weights."""
    if added and _first_process():
        print(f"embedding and head shared weights, and are trained apart: {added:,} more parameters", file=sys.stderr)


class _Unquantized(nn.Module):
    """In place of a linear layer with weights of few bits (``bitsandbytes``), which can't compute on meta."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.weight = nn.Parameter(torch.empty_like(layer.weight.data, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, x.new_empty(self.out_features, self.in_features), self.bias)


def _built(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of a block, which shares nothing with other blocks, with parameters of a type. Copies no weights to meta."""
    if torch.get_default_device().type == "meta":
        known: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta", dtype), p.requires_grad) for p in module.parameters()}
        quantized = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and not layer.weight.is_floating_point()]
        known |= {id(layer): copy.deepcopy(_Unquantized(layer), known) for layer in quantized}
        return copy.deepcopy(module, known)
    block = copied(module)
    for parameter in block.parameters():
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    return block


def built(module: nn.Module) -> nn.Module:
    """Return a block itself, so that its weights are those of the model that it belongs to; on meta, a copy without weights."""
    return _built(module, None) if torch.get_default_device().type == "meta" else module


def _first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def check_generation(model: Any) -> None:
    """Check before training that the settings of generation can be saved with the model.

    Raises:
        ConfigError: If not.
    """
    config = getattr(model, "generation_config", None)
    try:
        if config is not None and model.can_generate():
            config.validate(strict=True)
    except ValueError as error:
        raise ConfigError(f"model.generation_config: {' '.join(str(error).split())}") from error


def with_all_weights(model: nn.Module, result: Any, *, untied: bool) -> Any:
    """Return what ``load_state_dict`` has returned for a checkpoint, once nothing is missing.

    Args:
        untied: Whether embedding and head are trained apart. A file in which they are one weight then sets both.

    Raises:
        ConfigError: If weights are missing. The message names them.
    """
    base: Any = base_of(model)
    weight = base.get_output_embeddings().weight if untied else None
    head = next((name for name, p in model.named_parameters() if p is weight), "")
    if weight is not None and head in result.missing_keys:
        with torch.no_grad():
            weight.copy_(base.get_input_embeddings().weight)
        result = result._replace(missing_keys=[name for name in result.missing_keys if name != head])
    ignored: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    missing = [name for name in result.missing_keys if name not in ignored]
    expected = "all weights of the model (embedding and head are trained apart here)"
    require(not missing, "resume_from_checkpoint", expected, f"none of {', '.join(missing)}")
    return result
