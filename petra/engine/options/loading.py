"""Parameters and buffers of blocks from a state dictionary of the whole model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from petra.errors import ModelError
from petra.model import Model


def load_blocks(model: Model, own: Mapping[str, nn.Module], state: Mapping[str, Tensor]) -> None:
    """Load parameters and buffers into blocks.

    Args:
        model: The model.
        own: Blocks to load into, by name.
        state: Tensors by ``<block>.<name>``. Entries of other blocks of the model are ignored.

    Raises:
        ModelError: If a key belongs to no block of the model, or an entry of a block is missing or has another shape.
    """
    names = {block.name for block in model.blocks}
    for key in state:
        if key.partition(".")[0] not in names:
            raise ModelError(f"contains {key}, but {model.name} has no such block")
    for block, module in own.items():
        try:
            module.load_state_dict({key.removeprefix(f"{block}."): t for key, t in state.items() if key.startswith(f"{block}.")})
        except RuntimeError as error:
            raise ModelError(f"block {block} does not fit ({' '.join(str(error).split())})") from error
