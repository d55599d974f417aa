"""Layers with momentum: the recurrence, its exact inverse in bf16, methods with other weights, and the export."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from petra import Numerics, PetraError, Pipeline, TensorSpec
from tests.support.nets import assert_equal, make_pipeline, sgd
from tests.support.refusals import refuses

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from petra.huggingface import Momentum, from_pretrained, save_pretrained
from tests.huggingface.models import LENGTH, batch_of, tiny
from tests.huggingface.test_load import Padded

NAME = "LlamaForCausalLM"


def pipeline_of(model: torch.nn.Module, method: str, numerics: Numerics | None = None) -> Pipeline:
    converted = from_pretrained(model, fields=Padded.fields, coupling=Momentum(3))
    spec = TensorSpec((3, 2, LENGTH + 2), torch.int64)
    return make_pipeline(converted, spec, optimizer=sgd, method=method, k=2, stages=3, numerics=numerics or Numerics())


def test_layers_have_momentum() -> None:
    model = tiny(NAME, num_hidden_layers=4)
    tokens, targets = batch_of(NAME, 0)[0]["input_ids"], batch_of(NAME, 0)[1]
    network = from_pretrained(model, coupling=Momentum(3, gamma=0.5)).build(0)
    F.cross_entropy(network(tokens), targets).backward()
    x, v = model.model.embed_tokens(tokens), 0.0
    tables = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    for layer in model.model.layers[:3]:
        v = 0.5 * v + 0.5 * (layer(x, position_embeddings=tables) - x)
        x = x + v
    last = model.model.layers[3](x + v, position_embeddings=tables)
    F.cross_entropy(model.lm_head(model.model.norm(last)).flatten(0, 1), targets).backward()
    for i, layer in enumerate(model.model.layers):
        found = dict(getattr(network, f"layer{i}").named_parameters())
        for key, p in layer.named_parameters():
            name = f"f.layer.{key}" if i < 3 else f"block.layer.{key}"
            torch.testing.assert_close(found[name].grad, p.grad, rtol=1e-2, atol=1e-4)


def test_nothing_is_stored_and_gradients_are_exact_in_bf16(tmp_path: Path) -> None:
    numerics, states = Numerics(autocast=torch.bfloat16), []
    for method in ("reversible", "backprop"):
        pipeline = pipeline_of(tiny(NAME, torch.float32, num_hidden_layers=4), method, numerics)
        pipeline.train(Padded(), 8)
        states.append(pipeline.state_dict())
        kinds = [type(runner).__name__ for stage in pipeline.stages.values() for runner in stage.runners]
        assert sum("Reconstruct" in kind or "Side" in kind for kind in kinds) == (3 if method == "reversible" else 0)
    assert_equal(states[0], states[1])
    save_pretrained(tiny(NAME, torch.float32, num_hidden_layers=4), states[0], tmp_path)
    written = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    torch.testing.assert_close(written["model.layers.2.mlp.up_proj.weight"], states[0]["layer2.f.layer.mlp.up_proj.weight"])


test_what_does_not_fit_is_one_clear_error = refuses(
    lambda call, *arguments: call(*arguments),
    (
        lambda: pipeline_of(tiny(NAME, torch.float32, num_hidden_layers=4), "petra").train(Padded(), 8),
        "^coupling: .*, got an input",
    ),
    (lambda: pipeline_of(tiny(NAME), "reversible"), r"^coupling\.layers: expected at most 2, those of the model, got 3$"),
    (Momentum, 3, 0.3, r"^coupling\.gamma: expected a power of two below 1, such as 0\.25, got 0\.3$"),
    (Momentum, 13, r"^coupling\.layers: expected 1 to 12 with gamma=0\.25, got 13$"),
    (lambda: from_pretrained(tiny(NAME), coupling=0.5), "coupling: expected None or a Momentum, got 0.5"),  # type: ignore[arg-type]
    (lambda: pipeline_of(tiny(NAME, num_hidden_layers=4), "reversible", Numerics(exact_streams=True)), "exact_streams: expected"),
    (lambda: save_pretrained(tiny(NAME), {"head.w": torch.ones(1)}, "new"), "state: expected weights of .*, layer0, .*, got head"),
    kind=PetraError,
)
