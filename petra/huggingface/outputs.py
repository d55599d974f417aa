"""The loss of a model of ``transformers`` from logits that other processes have computed.

The model's own ``forward``, and whatever wraps it or replaces its loss, runs on the last stage. The modules below it are replaced
for the call: by one that checks its inputs, and one that returns the logits. Their weights are stand-ins, which have no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from petra.errors import ModelError, require
from petra.huggingface.absent import AbsentWeights
from petra.huggingface.feed import IMAGES, versions
from petra.huggingface.inputs import FIELDS
from petra.torch_private import module_hooks, version_counter

HEADS = ("lm_head", "cls", "classifier")
"""Modules that return the logits."""
HARMLESS = {"use_cache", "return_dict", "num_items_in_batch", "labels", "logits_to_keep"}
"""Arguments of the modules below the head that change nothing that a pipeline computes."""


@contextmanager
def answering(
    base: Any, batch: Mapping[str, Tensor], found: Tensor, weights: Sequence[Tensor] | None, dtype: torch.dtype | None
) -> Iterator[None]:
    """Let calls of a model return what a pipeline has computed inside the ``with`` block, for the inputs of ``batch`` only.

    Args:
        base: Model of ``transformers``, without adapters around it.
        batch: The batch, as the collator has made it.
        found: Logits (B, T, classes) or (B, classes) of its rows; with ``weights``, hidden states (B, T, D), of which the head
            computes what it is asked for.
        weights: Weight, and bias, that the head uses instead of its own, or none of them; None: ``found`` are logits.
        dtype: Type in which the model's ``forward`` computes under autocast, as in ``Trainer``, or None.

    Raises:
        ModelError: If the model is called a second time, or with other inputs.
    """
    head = next(name for name in HEADS if hasattr(base, name))
    replaced: dict[str, nn.Module] = {base.base_model_prefix: _Body(batch, found, whole=weights is not None)}
    if weights is None:
        replaced |= {head: _Head(found), **{name: nn.Identity() for name in ("dropout",) if name in base._modules}}
    own = {name: base._modules[name] for name in replaced}
    layer, others = getattr(base, head), dict(zip(("weight", "bias"), weights or (), strict=False))
    parameters = layer._parameters
    layer._parameters = {name: p for name, p in parameters.items() if name not in others}
    vars(layer).update(others)
    for name, module in replaced.items():
        vars(module)["_parameters"] = AbsentWeights(own[name], found.device)
    base._modules.update(replaced)
    forward = vars(base).get("forward")
    if dtype is not None:
        vars(base)["forward"] = convert_outputs_to_fp32(torch.autocast(found.device.type, dtype)(base.forward))
    try:
        yield
    finally:
        vars(base).pop("forward", None)
        vars(base).update({} if forward is None else {"forward": forward})
        base._modules.update(own)
        layer._parameters = parameters
        for name in others:
            del vars(layer)[name]


class Hidden:
    """What the modules below the head return: states with no values, and None for everything else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, i: Any) -> Any:
        return self.last_hidden_state if isinstance(i, int) else ()

    def __getattr__(self, name: str) -> None:
        return None


class _Body(nn.Module):
    batch: Any
    states: Any

    def __init__(self, batch: Mapping[str, Tensor], found: Tensor, *, whole: bool) -> None:
        super().__init__()
        self.calls = 0
        object.__setattr__(self, "batch", versions({n: t for n, t in batch.items() if n in (*FIELDS, IMAGES)}))
        states = found if whole else torch.zeros((), dtype=found.dtype, device=found.device).expand(found.shape)
        object.__setattr__(self, "states", states)

    def forward(self, *inputs: Any, **named: Any) -> Hidden:
        self.calls += 1
        require(self.calls == 1, "compute_loss", "a loss that calls the model once in a pipeline", "a second call", ModelError)
        first = next(iter(self.batch), None)
        given: dict[Any, Any] = {**({first: inputs[0]} if inputs else {}), **named}
        for name, value in given.items():
            if value is None or value is False or name in HARMLESS:
                continue
            tensor, version = self.batch.get(name, (None, 0))
            same = value is tensor and version_counter(tensor) == version
            expected = "the inputs of the batch, since the pipeline has computed the logits from them"
            require(same, f"{name} in forward", expected, "others", ModelError)
        states = self.states
        return Hidden(states if states.dim() > 2 else states[:, None])


class _Head(nn.Module):
    logits: Any

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "logits", logits)

    def forward(self, states: Tensor) -> Tensor:
        whole = states.dim() == 2 or states.shape[:2] == self.logits.shape[:2]
        fits = whole or self.logits.dim() == 2
        require(fits, "logits_to_keep", "0, all logits", "others", ModelError)
        return self.logits  # type: ignore[no-any-return]


def check_called(model: Any, base: Any, blocks: Mapping[str, nn.Module]) -> None:
    """Check that hooks and replaced methods are in modules that a pipeline calls, and that blocks share no weights.

    Raises:
        ModelError: If not. The message names the module.
    """
    owners: dict[int, str] = {}
    for name, block in blocks.items():
        for p in block.parameters():
            expected = "layers with weights of their own (only an embedding and a head that share theirs are trained apart)"
            require(owners.setdefault(id(p), name) == name, f"model, {name}", expected, f"those of {owners[id(p)]}", ModelError)
    called = {id(part) for block in blocks.values() for part in block.modules()}
    path = next(name for name, module in model.named_modules() if module is base)
    above = {id(model.get_submodule(path[:i])) for i in range(len(path)) if i == 0 or path[i] == "."}
    for name, module in model.named_modules():
        if id(module) in called or id(module) in above or module is base:
            continue
        hooks = bool(module_hooks(module))
        got = "hooks" if hooks else "a replaced forward"
        expected = "none: a pipeline calls its layers, embedding and head, and the model itself"
        require(not (hooks or "forward" in vars(module)), f"module {name}", expected, got, ModelError)
