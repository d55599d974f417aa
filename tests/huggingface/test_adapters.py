"""Adapters, saved models, and trainers such as ``SFTTrainer`` of TRL, in a pipeline."""

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from petra import ConfigError, ModelError, PetraError
from petra.huggingface import PetraTrainer, from_pretrained, pipelined
from petra.huggingface.check import tiny as tiny_of_family
from tests.huggingface.models import batch_of
from tests.huggingface.test_equal_to_trainer import both, llama, overridden
from tests.huggingface.test_trainer import arguments, losses, rows

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])


def hooked() -> Any:
    model = llama()
    model.enable_input_require_grads()
    torch.manual_seed(0)
    return get_peft_model(model, LORA)


def test_lora_with_gradients_of_inputs_and_checkpointing(tmp_path: Path) -> None:
    both(tmp_path, hooked, rows(16), gradient_checkpointing=True)


class Int8(nn.Linear):
    """A layer as those of ``bitsandbytes``: the scale is an attribute of the parameter, and a copy of it is none."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        scale = layer.weight.detach().abs().max() / 127
        self.weight: Any = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.weight.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.weight.scale)


def quantized() -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.up_proj = Int8(layer.self_attn.q_proj), Int8(layer.mlp.up_proj)
    return model


def test_bases_with_weights_of_few_bits_get_adapters(tmp_path: Path) -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        return get_peft_model(quantized(), LoraConfig(r=2, target_modules=["v_proj"]))

    both(tmp_path, adapted, rows(16))
    with pytest.raises(ModelError, match=r"^model: expected floating-point weights .*, got torch.int8"):
        from_pretrained(quantized())


def test_files_have_the_adapters_of_all_stages(tmp_path: Path) -> None:
    found = []
    for kind, others in ((Trainer, {}), (PetraTrainer, {"stages": 4})):
        torch.manual_seed(0)
        trainer = kind(get_peft_model(llama(), LORA), arguments(tmp_path, max_steps=3), train_dataset=rows(16), **others)
        trainer.train()
        trainer.save_model(tmp_path / kind.__name__)
        found.append(load_file(tmp_path / kind.__name__ / "adapter_model.safetensors"))
        assert not (tmp_path / kind.__name__ / "model.safetensors").exists()
    assert found[0].keys() == found[1].keys()
    assert {key.split(".layers.")[1][0] for key in found[1]} == {"0", "1"}
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-6)
    again = PeftModel.from_pretrained(llama(), tmp_path / "PetraTrainer")
    inputs = batch_of("LlamaForCausalLM", 1)[0]
    torch.testing.assert_close(again(**inputs).logits, trainer.model.eval()(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_a_loss_of_the_routers_is_refused(tmp_path: Path) -> None:
    import transformers

    model = tiny_of_family(transformers.MixtralForCausalLM).float()
    model.config.output_router_logits = True
    with pytest.raises(ModelError, match=r"output_router_logits: expected false: a loss of the routers .*, got true"):
        PetraTrainer(model, arguments(tmp_path), train_dataset=rows(8))


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
)
def test_prompts_are_refused_by_name(config: Any, tmp_path: Path) -> None:
    name = config.peft_type.value
    with pytest.raises(PetraError, match=f"^model: expected adapters in layers, .* got {name}$"):
        PetraTrainer(get_peft_model(llama(), config), arguments(tmp_path), train_dataset=rows(8))


class Chunked(Trainer):
    """A trainer whose model computes its loss from hidden states and the weight of the head, as that of TRL does."""

    def __init__(self, model: Any, args: Any, factor: float = 1.0, **named: Any) -> None:
        args.loss_type = "chunked_nll"
        self.factor, head = factor, model.get_output_embeddings()

        def forward(self: Any, input_ids: Any = None, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
            states = self.base_model(input_ids=input_ids, **inputs).last_hidden_state
            logits = states[:, :-1].flatten(0, 1) @ head.weight.T
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / (num_items_in_batch or labels[:, 1:].numel())
            return CausalLMOutputWithPast(loss=loss, logits=logits[None])

        model.forward = MethodType(forward, model)
        super().__init__(model, args, **named)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        inputs["use_cache"] = False
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        return (loss * self.factor, outputs) if return_outputs else loss * self.factor

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        return super().training_step(*arguments, **named)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_of_hidden_states_equals_that_of_its_own_trainer(tmp_path: Path, bf16: bool) -> None:
    found = []
    for kind, others in ((Chunked, {}), (pipelined(Chunked), {"stages": 4})):
        args = arguments(tmp_path / kind.__name__, max_steps=4, gradient_accumulation_steps=2, learning_rate=1e-2, bf16=bf16)
        model = llama()
        trainer = kind(model, args, factor=0.5, train_dataset=rows(16), eval_dataset=rows(6), **others)
        trainer.train()
        found.append(
            [*(row[0] for row in losses(trainer)), trainer.evaluate()["eval_loss"], *model.lm_head.weight.flatten().tolist()]
        )
    assert type(trainer).__name__ == "PetraChunked"
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def test_the_arguments_bound_rows_of_data_that_cannot_be_indexed(tmp_path: Path) -> None:
    """The first batch has the shortest rows. Each batch of the second loader is a row of packed ones."""
    data = sorted(rows(16, padded=True), key=lambda row: len(row["input_ids"]))
    stream = type("Stream", (IterableDataset,), {"__iter__": lambda self: iter(data)})
    for collate in (padded, packed):
        found = []
        for kind, others in ((Chunked, {}), (pipelined(Chunked), {"stages": 2})):
            args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=2, remove_unused_columns=False)
            args.max_length = 12
            trainer = kind(llama(), args, train_dataset=stream(), data_collator=collate, **others)
            trainer.train()
            found.append([row[0] for row in losses(trainer)])
        assert found[1] == pytest.approx(found[0], rel=1e-5)


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: pad_sequence([row[name] for row in batch], True, value) for name, value in values.items()}


def packed(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    joined = {name: torch.cat([row[name] for row in batch])[None] for name in ("input_ids", "labels")}
    return joined | {"position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in batch])[None]}


def test_a_step_that_calls_no_other_is_refused(tmp_path: Path) -> None:
    kind = overridden("training_step", lambda step, self, *others, **named: torch.zeros(()))[0]
    with pytest.raises(ConfigError, match=r"expected methods that a pipeline calls, .* got its own training_step"):
        pipelined(kind)(llama(), arguments(tmp_path), train_dataset=rows(8))
    with pytest.raises(ConfigError, match=r"^pipelined: expected a subclass of transformers.Trainer, got dict"):
        pipelined(dict)
    assert {pipelined(Trainer), pipelined(PetraTrainer)} == {PetraTrainer}


def numbers() -> Any:
    """Return a tokenizer of the numbers from 2 to 60."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, **{str(i): i for i in range(2, 61)}}, "<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


@pytest.mark.parametrize("settings", [{}, {"packing": True, "max_length": 16}, {"loss_type": "nll", "completion_only_loss": True}])
def test_sft_trainer(settings: dict[str, Any], tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = numbers()
    data = [
        {"input_ids": row["input_ids"].tolist(), "completion_mask": [0] * 4 + [1] * (len(row["input_ids"]) - 4)} for row in rows(16)
    ]
    found = []
    for kind, others in ((trl.SFTTrainer, {}), (pipelined(trl.SFTTrainer), {"stages": 3})):
        args = trl.SFTConfig(
            str(tmp_path / kind.__name__), report_to="none", use_cpu=True, bf16=False, max_steps=3, logging_steps=1, **settings
        )
        torch.manual_seed(0)
        named = {"train_dataset": datasets.Dataset.from_list(data), "processing_class": tokenizer, "peft_config": LORA}
        trainer = kind(llama(), args, **named, **others)
        trainer.train()
        names = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")
        found.append([row[name] for row in trainer.state.log_history if "loss" in row for name in names])
    assert len(found[0]) == 15
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_dpo_trainer(tmp_path: Path) -> None:
    """With a reference model and with its logarithms of probabilities, computed before; trainers that generate are refused."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = [{"prompt": f"{i} 3 4", "chosen": f" {i + 1} 5 6", "rejected": " 7" * i} for i in range(2, 18)]
    for ahead in (False, True):
        found = []
        for kind, others in ((trl.DPOTrainer, {}), (pipelined(trl.DPOTrainer), {"stages": 3})):
            settings = {
                "use_cpu": True,
                "bf16": False,
                "max_steps": 3,
                "logging_steps": 1,
                "report_to": "none",
                "save_strategy": "no",
            }
            settings |= {"precompute_ref_log_probs": ahead, "learning_rate": 0.01, "gradient_checkpointing": False}
            args = trl.DPOConfig(str(tmp_path / kind.__name__), **settings)
            named = {"train_dataset": datasets.Dataset.from_list(data), "processing_class": numbers()}
            trainer = kind(llama(), ref_model=None if ahead else llama(), args=args, **named, **others)
            trainer.train()
            names = ("loss", "grad_norm", "rewards/margins", "logps/chosen")
            found.append([row[name] for row in trainer.state.log_history if "loss" in row for name in names])
        assert len(found[0]) == 12
        assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ConfigError, match="its own _load_optimizer_and_scheduler"):
        pipelined(trl.GRPOTrainer)(
            llama(), args=args, train_dataset=named["train_dataset"], processing_class=numbers(), reward_funcs=len
        )
