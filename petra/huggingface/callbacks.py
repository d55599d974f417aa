"""Callbacks of ``Trainer`` in a pipeline: which of them read the model, and their states."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from inspect import CO_VARARGS, CO_VARKEYWORDS, unwrap
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

from petra.errors import ModelError, require

ALWAYS = ("on_init_end", "on_train_begin", "on_train_end", "on_predict")
"""Events at which the model always has all weights."""
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_") and name not in ALWAYS]
"""Other events, at which callbacks may read the model."""
ONLY_AT = {"on_evaluate": "should_evaluate", "on_prediction_step": "should_evaluate", "on_save": "should_save"}
"""Events that come only where the control asks for something."""
GRADIENTS = {"grad", "clip_grad_norm_", "clip_grad_value_", "get_total_norm"}


def reading_events(callbacks: Sequence[Any]) -> list[str]:
    """Return the events at which a callback of a user may read the model: its code has that name, or passes on what it got.

    Raises:
        ModelError: If one reads gradients before a step, which a pipeline has made by then.
    """
    found = []
    for callback in callbacks:
        own = type(callback).__module__.startswith("transformers.")
        for event in () if own else EVENTS:
            bound = getattr(callback, event, None)
            method = unwrap(getattr(bound, "__func__", bound)) if bound is not None else None
            if method not in (None, getattr(TrainerCallback, event)) and not _is_plain(method):
                found.append(event)
            expected = "a callback that reads no gradients: the stages have made their steps"
            reads = event == "on_pre_optimizer_step" and bool(names_in(getattr(method, "__code__", None)) & GRADIENTS)
            require(not reads, f"{type(callback).__name__}.{event}", expected, "one that does", ModelError)
    return found


def names_in(code: Any) -> set[str]:
    """Return the names in the code of a function, and in that of functions and comprehensions inside it."""
    inner = (each for each in getattr(code, "co_consts", ()) if hasattr(each, "co_names"))
    return {*getattr(code, "co_names", ())}.union(*map(names_in, inner))


def _is_plain(method: Any) -> bool:
    """Return whether a function surely doesn't read the argument ``model``."""
    code = getattr(method, "__code__", None)
    if code is None:
        return False
    named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    rest = code.co_varnames[named] if code.co_flags & CO_VARKEYWORDS else ""
    loaded = [str(each.argval) for each in dis.get_instructions(code) if each.opname.startswith("LOAD")]
    return "model" not in (*code.co_varnames, *code.co_names, *map(str, code.co_consts)) and not (rest and rest in loaded)


def restore_callbacks(callbacks: Sequence[Any], saved: TrainerState) -> bool:
    """Restore the states of callbacks, such as early stopping. Return whether one has stopped the run, if none has changed."""
    states = {name: each if isinstance(each, list) else [each] for name, each in saved.stateful_callbacks.items()}
    same = True
    for callback in callbacks:
        if isinstance(callback, ExportableState) and states.get(type(callback).__name__):
            state = states[type(callback).__name__].pop(0)
            same = same and callback.state()["args"] == state["args"]
            for name, value in state["attributes"].items():
                setattr(callback, name, value)
    controls: list[dict[str, Any]] = states.get("TrainerControl", [])
    return any(each["args"]["should_training_stop"] for each in controls) and saved.global_step < saved.max_steps and same
