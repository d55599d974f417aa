"""Check which decoders of ``transformers`` are computed as ``transformers`` computes them.

``python -m petra.huggingface.check`` checks every decoder of the installed ``transformers``, and writes ``families.json``. With
names, it checks these classes only, and writes nothing.
"""

from __future__ import annotations

import gc
import inspect
import json
import re
import sys
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from petra.errors import first_line, require
from petra.huggingface.blocks import SPLITTERS, decoder, split
from petra.huggingface.families import FILE, PLAN
from petra.huggingface.inputs import stack
from petra.huggingface.load import from_pretrained
from petra.specs import TensorSpec

VOCABULARY, ROWS, LENGTH = 61, 3, 12
LARGEST = 10_000_000
"""Parameters of a model that is not small: parts of it, such as encoders of images, have sizes of their own."""
STARTS = (4, 0, 3)
"""Numbers of tokens that are padding, or another document before the last one, in each row."""
TOLERANCE = 1e-10
"""Largest difference, absolute and relative, in float64."""
SIZES = {
    r"vocab_size\w*": VOCABULARY,
    "hidden_size": 32,
    "qk_head_dim": 16,
    r"\w*(intermediate|ffn_hidden)_size": 16,
    r"\w*head_dim|rotary_dim|hidden_size_per_layer_input": 8,
    r"(swa_|linear_)?num_(attention_|value_)?heads": 4,
    r"(swa_|linear_)?num_key(_value)?_heads|index_n_heads|o_groups": 2,
    r"\w+_lora_rank|dim_model_base": 16,
    r"\w*num(_local|_routed)?_experts|n_routed_experts": 4,
    r"num_experts_per_tok(en)?|moe_k|moe_topk|zero_expert_num": 2,
    "n_group|num_expert_group": 2,
    "topk_group|first_k_dense_replace|num_dense_layers|num_nextn_predict_layers": 1,
    r"sliding_window(_size)?|attention_chunk_size|keep_window_size|rel_extent": 5,
    r"index_topk\w*|(index_)?block_size|d_rel|\w*norm_rank|laurel_rank": 4,
    "max_position_embeddings|model_max_length": 64,
    "pad_token_id": 0,
    r"\w*(bos|eos)_token_id": 2,
}
"""Largest values of the settings of a configuration, by patterns of names. Experts: two of four."""
MISSING = {"head_dim": 8, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
"""Settings without a default that a model needs."""
KINDS = ("layer_types", "mlp_layer_types", "indexer_types")
"""Settings that say of which kind each layer is."""


def candidates() -> list[str]:
    """Return the names of the causal language models whose ``base_model_pp_plan`` is :data:`PLAN`."""
    found = []
    for name in (name for name in dir(transformers) if name.endswith("ForCausalLM")):
        config = getattr(getattr(transformers, name), "config_class", None)
        found += [name] if tuple(getattr(config, "base_model_pp_plan", None) or ()) == PLAN else []
    return found


def tiny(kind: Any) -> Any:
    """Return a random model of a class with the defaults of its family, reduced in size only, in float64 and training mode.

    It has as many layers as it needs to have one of each kind: of attention, and with and without experts.
    """
    make = kind.config_class
    default = make()
    sizes: dict[str, Any] = {"tie_word_embeddings": False}
    for name, value in vars(default).items():
        if value is None and name in MISSING:
            sizes[name] = MISSING[name]
        most = next((most for pattern, most in SIZES.items() if re.fullmatch(pattern, name)), None)
        if type(value) is int and most is not None and value > most:
            sizes[name] = most
        if type(value) is float and "drop" in name:
            sizes[name] = 0.0
    if getattr(default, "num_key_value_heads", 0) == default.num_attention_heads:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    kinds = {name: set(getattr(default, name)) for name in KINDS if getattr(default, name, None)}
    if getattr(default, "head_dim", None) == getattr(default, "qk_head_dim", 0):
        sizes["head_dim"] = sizes["qk_head_dim"]
    layers = "num_hidden_layers" if "num_hidden_layers" in inspect.signature(make.__init__).parameters else "num_layers"
    for count in range(2, 13):
        config = make(**sizes, **{layers: count})
        if all({*getattr(config, name)} == found for name, found in kinds.items()):
            break
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # others have no float64
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    require(count < LARGEST, "model", f"fewer than {LARGEST:,} parameters", f"{count:,}")
    model = kind(config).double().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def batches() -> dict[str, dict[str, Tensor]]:
    """Return batches of whole rows, rows with padding at their ends or beginnings, and packed documents."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    index, starts = torch.arange(LENGTH).expand(tokens.shape), torch.tensor(STARTS)[:, None]
    found = {"whole rows": {"input_ids": tokens}}
    for name, real in (("padding at the ends", index < LENGTH - starts), ("padding at the beginnings", index >= starts)):
        found[name] = {"input_ids": tokens.where(real, 0), "attention_mask": real.long()}
    found["packed documents"] = {"input_ids": tokens, "position_ids": torch.where(index < starts, index, index - starts)}
    return found


def check(name: str) -> str | None:
    """Return None if blocks compute what a class of ``transformers`` computes, and otherwise why not.

    Compares logits, loss and all gradients in float64, and profiles the model on the meta device. Where the model itself has NaN
    in float64, as masks of eager attention are infinite there, it compares in float32. Where the model lets packed documents see
    each other, it compares with documents that are computed alone.
    """
    try:
        model = tiny(getattr(transformers, name))
    except Exception as error:
        return f"no model of reduced size with the defaults of the family ({_line(error)})"
    own, model.config.use_cache = SPLITTERS.get(name), False
    SPLITTERS[name] = decoder
    try:
        for case, batch in batches().items():
            reason = _compare(model, batch, TOLERANCE)
            if reason is not None and model(**batch).logits.isnan().any():
                reason = _compare(model.float(), batch, 1e-5)
                model.double()
            if case.startswith("packed"):
                alone = _alone(model, batch["input_ids"])
                apart = torch.allclose(alone, model(**batch).logits.flatten(0, 1), 1e-5, 1e-5)  # routers are float32
                reason = reason if apart else _compare(model, batch, 1e-5, alone=True)
            if reason is not None:
                return reason if "weights" in reason else f"{case}: {reason}"
        from_pretrained(model.float()).profile(TensorSpec((ROWS, LENGTH), torch.int64))
    except Exception as error:
        return _line(error)
    finally:
        SPLITTERS.pop(name)
        SPLITTERS.update({} if own is None else {name: own})
    return None


def _alone(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of documents, each of which is computed alone."""
    parts = [part[None] for row, n in zip(tokens, STARTS, strict=True) for part in (row[:n], row[n:]) if len(part)]
    return torch.cat([model(input_ids=part).logits[0] for part in parts])


def _compare(model: Any, batch: dict[str, Tensor], tolerance: float, *, alone: bool = False) -> str | None:
    fields, targets = tuple(batch), torch.randint(VOCABULARY, (ROWS * LENGTH,), generator=torch.Generator().manual_seed(1))
    targets[batch.get("attention_mask", torch.ones(ROWS, LENGTH)).flatten() == 0] = -100
    real, network = targets != -100, from_pretrained(model, fields=fields).build(0)
    logits, loss, gradients = _results(network, lambda: network(stack(batch, fields)), targets)
    ids = batch["input_ids"]
    logits_, loss_, gradients_ = _results(
        model, lambda: _alone(model, ids) if alone else model(**batch).logits.flatten(0, 1), targets
    )
    named = dict(model.named_parameters())
    keys = {id(p): f"{block}.{key}" for block, part in split(model, fields, None).items() for key, p in part.named_parameters()}
    missing = [name for name, p in named.items() if id(p) not in keys]
    if missing:
        return f"weights outside of {', '.join(PLAN)} and lm_head: {', '.join(missing[:3])}"
    pairs: dict[str, tuple[Any, Any]] = {"logits": (logits[real], logits_[real]), "loss": (loss, loss_)}
    pairs |= {f"gradient of {name}": (gradients[keys[id(p)]], gradients_[name]) for name, p in named.items()}
    for what, (a, b) in pairs.items():
        if (a is None) != (b is None) or (a is not None and not torch.allclose(a, b, tolerance, tolerance)):
            return f"another {what}"
    return None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _results(module: Any, call: Any, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    module.zero_grad()
    logits = call()
    loss = F.cross_entropy(logits, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return logits.detach(), loss.detach(), {key: None if p.grad is None else p.grad.clone() for key, p in module.named_parameters()}


def main(names: list[str]) -> None:
    """Check classes, print what was found, and write the file if no names were given."""
    found = {}
    for name in names or candidates():
        found[name] = check(name)
        gc.collect()
        print(f"{name}: {found[name] or 'equal'}", flush=True)
    if not names:
        accepted = [name for name, reason in found.items() if reason is None]
        refused = {name: reason for name, reason in found.items() if reason is not None}
        content = {"transformers": transformers.__version__, "accepted": accepted, "refused": refused}
        FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
