"""Formats of few bits against plain formulas; stored inputs; runs in one process and in several."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import ConfigError, Keep, Method, Numerics, TensorSpec
from petra.cost_model.memory import stored_activations
from petra.message_formats import FEW_BITS
from petra.models import revgpt
from petra.plan import make_plan
from petra.plan.messages import boundary
from petra.quantization import format_named, hash_bits, quantized
from petra.specs import PackedPart
from petra.training import Checkpoints
from tests.support.nets import RandomSource, RandomTokens, assert_equal, make_pipeline, mixed, restored, sgd
from tests.support.processes import run_processes
from tests.support.refusals import refuses

SHAPES = ((3, 5, 14), (3, 5, 7))
LEVELS = {"int8": 127, "int4": 7, "float8": 448}


def part_of(name: str, shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> PackedPart:
    return PackedPart((*(TensorSpec(s, dtype, message_format=name) for s in shapes), TensorSpec((3, 5), torch.int32)))


def passed(part: PackedPart, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return what arrives, as it is in a buffer: in the types and shapes of the specs."""
    pieces = [t.clone() for t in part.pack(tensors)]
    assert [TensorSpec(tuple(t.shape), t.dtype) for t in pieces] == part.specs
    return part.unpack(pieces)


@pytest.mark.parametrize("name", FEW_BITS)
def test_elements_are_off_by_at_most_a_part_of_their_scale(name: str) -> None:
    torch.manual_seed(0)
    x, z, ids = torch.randn(SHAPES[0]), 100 * torch.randn(SHAPES[1]), torch.arange(15, dtype=torch.int32).view(3, 5) * 10**8
    found = passed(part_of(name), x, z, ids)
    assert torch.equal(found[2], ids)
    kind = name.split("_")[0]
    for given, arrived in zip((x, z), found, strict=False):
        largest = given.abs().amax((2,) if "token" in name else (0, 1, 2), keepdim=True)
        share = 2**-4 if kind == "float8" else (1.0 if "stochastic" in name else 0.5) / LEVELS[kind]
        assert ((given - arrived).abs() <= largest * share * 1.01 + 1e-7).all()  # scales are rounded
        assert (given - arrived).abs().max() > 0


def test_bytes_are_those_of_elements_and_scales() -> None:
    """int4 of an odd size; scales of tokens take two bytes, others four; the side tensor has 60 bytes."""
    expected = {"int8": 315 + 8, "int4": 105 + 53 + 8, "int4_token": 105 + 53 + 2 * 30, "float8_token": 315 + 2 * 30}
    for name, size in expected.items():
        assert part_of(name).bytes == size + 60, name


def test_int4_equals_the_formula() -> None:
    x = torch.tensor([[0.7, -0.06, 0.26, -0.35, 0.04], [0.0, 0.0, 0.0, 0.0, 0.0], [7.0, 3.4, -3.6, 0.2, -7.0]])
    (found,) = passed(PackedPart((TensorSpec((3, 5), torch.float32, message_format="int4_token"),)), x)
    scale = torch.tensor(0.1).bfloat16().item()
    expected = torch.tensor([[7 * scale, -scale, 3 * scale, -3 * scale, 0.0], [0.0] * 5, [7.0, 3.0, -4.0, 0.0, -7.0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_stochastic_rounding_is_unbiased_and_a_function_of_the_message() -> None:
    spec = TensorSpec((100, 40), torch.float32, message_format="int4_stochastic")
    part, total = PackedPart((spec,)), torch.zeros(100, 40)
    x = torch.rand(100, 40) - 0.5
    x[0, 0] = 0.7  # the scale is 0.1
    assert_equal(passed(part, x), passed(part, x.clone()))
    count = 400
    for i in range(count):
        changed = x.clone()
        changed[0, 1] = i / 1000  # another entry changes the random numbers of all
        total += passed(part, changed)[0]
    mean = total / count
    assert (mean - x)[1:].abs().max() < 5 * 0.1 / 2 / count**0.5
    assert (mean - x)[1:].mean().abs() < 5 * 0.1 / 2 / (count * 3960) ** 0.5
    assert not torch.equal(passed(part, x)[0], passed(PackedPart((replace(spec, message_format="int4"),)), x)[0])


def test_random_numbers_do_not_depend_on_how_many_are_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec((3, 8, 5, 4), torch.float32, message_format="int8_stochastic")
    for x in (torch.randn(3, 8, 5, 4), torch.randn(3, 8, 5, 4).to(memory_format=torch.channels_last)):
        whole = passed(PackedPart((spec,)), x)
        for part in (1, 7, 20, 300):
            monkeypatch.setattr(quantized, "PART", part)
            assert_equal(passed(PackedPart((spec,)), x), whole)
        monkeypatch.undo()


def test_bits_of_the_hash_are_mixed() -> None:
    bits = hash_bits(torch.arange(10_000))
    assert len(bits.unique()) == 10_000
    ones = torch.stack([(bits >> i & 1).double().mean() for i in range(32)])
    assert ((ones - 0.5).abs() < 0.03).all()


@pytest.mark.parametrize("name", ["int4_token", "int8", "float8"])
def test_values_that_are_not_finite_arrive_as_such_and_zeros_as_zeros(name: str) -> None:
    zeros = torch.zeros(2, 4, 6)
    for bad in (math.inf, math.nan):
        x = torch.randn(2, 4, 6)
        x[1, 2, 3] = bad
        (found,) = passed(PackedPart((TensorSpec((2, 4, 6), torch.float32, message_format=name),)), x)
        assert not found[1, 2].isfinite().any()
    (found,) = passed(PackedPart((TensorSpec((2, 4, 6), torch.float32, message_format=name),)), zeros)
    assert torch.equal(found, zeros)


def test_streams_and_gradients_have_formats_of_their_own() -> None:
    spec, ids = TensorSpec((4, 6, 8), torch.float32), TensorSpec((4, 6), torch.int32)
    cases = {
        ("int8", None): ("int8", None, None),
        ("bf16", None): ("bf16", "bf16", "bf16"),
        ("int4_token", "int8"): ("int4_token", "int4_token", "int8"),
        (None, "bf16"): (None, None, "bf16"),
        ("bf16", "int4_stochastic"): ("bf16", "bf16", "int4_stochastic"),
    }
    for (x, delta), expected in cases.items():
        found = boundary([spec, spec, ids], Keep.NOTHING, Numerics(message_format=x, gradient_format=delta), metrics=0)
        forward, (returned, back, _) = found.forward[0], found.backward
        assert (forward[0].message_format, returned[0].message_format, back[0].message_format) == expected
        assert forward[2] == ids
        assert len(returned) == len(back) == 2
    assert format_named("bf16").both_directions


test_invalid_names = refuses(
    lambda _, arguments: Numerics(**arguments),
    (
        None,
        {"message_format": "int3"},
        r"message_format: expected null, bf16, int8, int8_stochastic, .* or float8_token, got int3",
    ),
    (None, {"gradient_format": "int4_row"}, r"gradient_format: expected null, bf16, int8, .*, got int4_row"),
    (None, {"stored_format": "int4"}, r"stored_format: expected null, bf16, int8 or int8_token, got int4"),
    (None, {"message_format": "float8_stochastic"}, r"message_format: expected .* got float8_stochastic"),
)


def test_a_stored_format_that_no_block_uses_is_refused() -> None:
    model, spec = revgpt(11, dim=8, depth=4, heads=2, size=12), RandomTokens(3, 12, 11).spec
    for method in ("1f1b", "petra"):  # petra's first block keeps tokens, which no format changes
        with pytest.raises(ConfigError, match=r"^stored_format: expected null, since no block after the first .* input, got int8$"):
            make_plan(model, spec, method=method, numerics=Numerics(stored_format="int8"))
    assert make_plan(model, spec, method="dsp", numerics=Numerics(stored_format="int8")).stages[1].keeps[0] is Keep.INPUT


def test_stored_inputs_have_the_size_of_their_format_and_gradients_are_close() -> None:
    """x̃ left out: the last block of each stage stores its input, in float32, bf16 or int8, and the next one returns no x̃."""
    model = revgpt(11, dim=8, depth=4, heads=2, size=12)
    data, stages = RandomTokens(3, 12, 11), [2, 2, 2]
    keep = tuple(Keep.INPUT if b in (0, 1, 3, 5) else Keep.NOTHING for b in range(6))
    method = Method("ends", 2, keep)
    sizes, found = [], []
    for stored in (None, "bf16", "int8", "int8_token"):
        numerics = Numerics(stored_format=stored)  # type: ignore[arg-type]
        plan = make_plan(model, data.spec, method=method, stages=stages, numerics=numerics)
        assert not plan.boundaries[0].backward[0]
        pipeline = make_pipeline(
            model, data.spec, method=method, stages=stages, numerics=numerics, k=6, optimizer=lambda m: sgd(m, 0.0)
        )
        y = pipeline.stages[1].forward(50, pipeline.stages[0].forward(50, (data.inputs(0),)))
        assert len(y) == 2
        sizes.append(pipeline.stages[1].stored_bytes())
        for stage in pipeline.stages.values():
            for runner in stage.runners:
                runner.stored.clear()
        pipeline.train(data, 5)
        found.append(torch.cat([p.grad.flatten() for s in pipeline.stages.values() for p in s.gradients.parameters]))
        counted = stored_activations(plan)[1]
        assert counted == plan.stages[1].in_flight * sum(-(-size // 512) * 512 for size in _pieces(stored))
    elements = 2 * 3 * 12 * 8
    assert sizes == [4 * elements, 2 * elements, elements + 2 * 4, elements + 2 * 2 * 36]
    for gradient in found[1:]:
        assert 0 < (gradient - found[0]).norm() < 0.03 * found[0].norm()


def _pieces(stored: str | None) -> list[int]:
    elements = 3 * 12 * 8
    factors = {"int8": [4, 4], "int8_token": [72, 72]}.get(stored or "", [])
    return [elements * {None: 4, "bf16": 2}.get(stored, 1)] * 2 + factors


CASES: dict[str, dict[str, Any]] = {
    "few": {"numerics": Numerics(message_format="int4_token", gradient_format="int4_stochastic")},
    "float8": {"numerics": Numerics(message_format="float8", gradient_format="int8_token_stochastic")},
    "ends": {
        "numerics": Numerics(message_format="int8_stochastic", gradient_format="bf16", stored_format="int8"),
        "method": Method("dsp", 2, Keep.INPUT),
    },
}


def train_all(rank: int | None) -> dict[str, Any]:
    found = {}
    for name, settings in CASES.items():
        pipeline = mixed(stages=[1, 2, 1, 2], k=2, seed=6, **settings)
        source = RandomSource()
        pipeline.train(source, 8)
        found[name] = pipeline.state_dict(), pipeline.evaluate(source, 2)
    return found


def test_stochastic_rounding_is_the_same_after_resuming(tmp_path: Path) -> None:
    settings = {"stages": [1, 2, 1, 2], "k": 2, "seed": 6, **CASES["float8"]}
    whole, first = mixed(**settings), mixed(**settings)
    whole.train(RandomSource(), 4)
    first.train(RandomSource(), 4)
    Checkpoints(tmp_path).save(first, {})
    again = restored(mixed(**settings), tmp_path)
    for pipeline in (whole, again):
        pipeline.train(RandomSource(), 4)
    assert_equal(again.state_dict(), whole.state_dict())


@pytest.mark.processes
def test_one_process_equals_several(tmp_path: Path) -> None:
    alone, parts = train_all(None), run_processes(3, train_all, tmp_path)
    for name, (weights, result) in alone.items():
        assert_equal({key: value for part in parts for key, value in part[name][0].items()}, weights)
        assert all(part[name][1] == result for part in parts)
