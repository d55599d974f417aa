"""Models of Hugging Face's ``transformers`` as sequences of blocks, and back. Needs ``pip install 'petra[huggingface]'``.

Nothing else in petra imports this package or ``transformers``.
"""

from petra.errors import ConfigError
from petra.huggingface.inputs import FIELDS, next_tokens, stack

try:
    from petra.huggingface.coupling import Momentum
    from petra.huggingface.load import from_pretrained, save_pretrained
    from petra.huggingface.subclass import pipelined
    from petra.huggingface.trainer import PetraTrainer
except ImportError as error:
    raise ConfigError(f"petra.huggingface: expected transformers (pip install -e '.[huggingface]'), got {error}") from error

__all__ = ["FIELDS", "Momentum", "PetraTrainer", "from_pretrained", "next_tokens", "pipelined", "save_pretrained", "stack"]
