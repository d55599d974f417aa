"""Settings of a pipeline that most runs leave at their defaults, grouped by what they change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from petra.errors import check_types, invalid, require
from petra.message_formats import FEW_BITS, MESSAGE_FORMATS

TransportName = Literal["auto", "local", "lockstep", "edge"]


@dataclass(frozen=True)
class Numerics:
    """Number formats and memory layouts.

    Attributes:
        autocast: Type in which blocks compute (``torch.bfloat16`` or ``torch.float16``), or None. Streams stay in float32.
        channels_last: Use the channels-last memory format for 4-d streams and weights.
        exact_streams: Round streams and the outputs of reversible blocks' functions to a grid on which additions are exact. With
            unchanged weights, reconstruction is then exact bit for bit (:mod:`petra.reversible.grid`).
        message_format: Name of the format in which streams and gradients travel between stages (:mod:`petra.message_formats`), or
            None for their own type. Applied between stages of one process too, so that results don't depend on the number of
            processes.
        gradient_format: The same for δ; x̃ then travels as x does. None: both as x if its format is one of both directions, as bf16.
        stored_format: Name of the format in which all blocks but the first store their inputs for backward, or None.

    Raises:
        ConfigError: If a value has another type, a type is not a floating-point type, or ``exact_streams`` is combined with
            ``message_format`` or ``stored_format``, which round.
    """

    autocast: torch.dtype | None = None
    channels_last: bool = False
    exact_streams: bool = False
    message_format: Literal[*MESSAGE_FORMATS, *FEW_BITS] | None = None  # type: ignore[valid-type]
    gradient_format: Literal[*MESSAGE_FORMATS, *FEW_BITS] | None = None  # type: ignore[valid-type]
    stored_format: Literal["bf16", "int8", "int8_token"] | None = None

    def __post_init__(self) -> None:
        check_types(self)
        accepted = (None, torch.bfloat16, torch.float16)
        require(self.autocast in accepted, "autocast", "None, torch.bfloat16 or torch.float16", self.autocast)
        for name in ("message_format", "stored_format") if self.exact_streams else ():
            require(getattr(self, name) is None, "exact_streams", f"false with {name}={getattr(self, name)}", "true")


@dataclass(frozen=True)
class Runtime:
    """Where and how a pipeline runs. Results depend on ``device`` and ``compile`` only, and their rounding on ``tp``.

    Attributes:
        device: Device of this process. A GPU becomes the process's current device; ``cuda`` is the one that the process group is
            bound to, or else the current device.
        transport: ``auto`` selects ``local`` in one process. In several, it selects ``lockstep`` on GPUs or if d = 2 at every
            boundary, and ``edge`` otherwise.
        compile: Backend of ``torch.compile`` for the functions inside blocks, or a mode of inductor, or None.
        refetch: Whether the first block fetches its input from the data source again in its backward pass instead of storing it.
            Saves the memory of one input for each microbatch in flight. Training data need a method ``refetch``.
        tp: Number of processes among which the linear layers of each stage are divided (docs/data_parallel.md).

    Raises:
        ConfigError: If a value has another type, or ``device`` is no device of torch.
    """

    device: torch.device | str = "cpu"
    transport: TransportName = "auto"
    compile: str | None = None
    refetch: bool = False
    tp: Annotated[int, ">= 1"] = 1

    def __post_init__(self) -> None:
        check_types(self)
        expected = "a device of torch, such as cpu or cuda:0"
        try:
            torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise invalid("device", expected, repr(self.device)) from error
        require(torch.device(self.device).type != "meta", "device", expected, "meta")
