"""Train a language model of ``transformers`` on a text with a ``Trainer`` whose processes are the stages of a pipeline.

``torchrun --nproc-per-node 4 examples/huggingface.py --text README.md --output_dir runs/llama``

All other arguments are those of ``TrainingArguments``. The lines with PetraTrainer are the only ones that differ from a script for
``Trainer``. A tiny Llama reads bytes; ``--model DIR`` takes a checkpoint instead, whose tokenizer reads the text.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    set_seed,
)

from petra.huggingface import PetraTrainer


@dataclass
class Arguments:
    """Arguments of this script, beside those of training."""

    text: str = "README.md"
    model: str | None = None
    block_size: int = 64
    method: str = "1f1b"


def main() -> None:
    """Train, save and evaluate."""
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    own, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    text = Path(own.text).read_text(encoding="utf-8")
    if own.model is None:
        settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=own.block_size, **settings))
        tokens = torch.tensor(list(text.encode()))
    else:
        model = AutoModelForCausalLM.from_pretrained(own.model)
        tokens = torch.tensor(AutoTokenizer.from_pretrained(own.model)(text)["input_ids"])
    blocks = [{"input_ids": block, "labels": block} for block in tokens.split(own.block_size)[:-1]]
    held_out = len(blocks) // 10
    trainer = PetraTrainer(
        model,
        args,
        train_dataset=blocks[held_out:],
        eval_dataset=blocks[:held_out],
        method=own.method,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_state()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
