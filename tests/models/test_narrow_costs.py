"""Token ids and formats of few bits in everything that counts bytes or watches a run."""

import torch

from petra import Keep, Numerics, Pipeline, TensorSpec
from petra.cost_model.costs import count_blocks, pipeline_costs, profile_blocks
from petra.cost_model.memory import predict_memory, stored_activations
from petra.diagnostics.reconstruction_error import ReconstructionMonitor
from petra.models import revgpt
from petra.plan import make_plan
from tests.support.nets import RandomTokens, make_pipeline, sgd

BATCH, LENGTH, STREAM, STAGES = 4, 16, 6, 4
TOKENS = BATCH * LENGTH
TEXTS = RandomTokens(BATCH, LENGTH, 11)
MODEL = revgpt(11, dim=24, depth=6, heads=4, size=LENGTH, stream=STREAM, delimiter=0, embedding_std=0.4)
FEW = Numerics(message_format="int4_token", gradient_format="int8_token")


def test_costs_of_messages_are_those_of_the_boundaries() -> None:
    """Counted, measured and planned costs have four bytes per token for ids, half a byte for an entry, two for a scale."""
    expected = {
        Numerics(): (TOKENS * (8 * STREAM + 4), TOKENS * 2 * 8 * STREAM),
        FEW: (TOKENS * (STREAM + 4 + 4), TOKENS * (STREAM + 4 + 2 * STREAM + 4)),
    }
    for numerics, sizes in expected.items():
        plan = make_plan(MODEL, TEXTS.spec, stages=STAGES, processes=STAGES, numerics=numerics)
        assert [(b.forward_bytes, b.backward_bytes) for b in plan.boundaries] == [sizes] * (STAGES - 1)
        counted = count_blocks(MODEL, TEXTS.spec, numerics)
        measured = profile_blocks(MODEL, TEXTS.spec, optimizer=sgd, numerics=numerics, rounds=1)
        for blocks in (counted, measured):
            keeps = [[Keep.NOTHING if block.reversible else Keep.INPUT] for block in blocks]
            costs = pipeline_costs([[block] for block in blocks], keeps)
            assert (costs[1].forward_bytes, costs[2].backward_bytes) == sizes
        assert all(block.forward > 0 and block.backward > 0 for block in measured)


def test_ids_are_stored_until_the_backward_pass_and_predicted() -> None:
    plan = make_plan(MODEL, TEXTS.spec, stages=STAGES)
    assert stored_activations(plan)[1] == plan.stages[1].in_flight * 512  # 256 bytes, rounded up as by the allocator
    pipeline = make_pipeline(MODEL, TEXTS.spec, optimizer=sgd, stages=STAGES)
    stage = pipeline.stages[1]
    stage.forward(9, pipeline.stages[0].forward(9, (TEXTS.inputs(0),)))
    assert stage.stored_bytes() == 4 * TOKENS
    targets = TensorSpec((TOKENS,), torch.int64)
    sent = [make_plan(MODEL, TEXTS.spec, stages=STAGES, processes=STAGES, numerics=numerics) for numerics in (Numerics(), FEW)]
    full, few = (predict_memory(each, pipeline.recipe, targets)[1].stored for each in sent)
    assert full - few >= TOKENS * (8 * STREAM - STREAM - 4)  # at least one message waits


def watched(numerics: Numerics, lr: float) -> tuple[Pipeline, ReconstructionMonitor]:
    pipeline = make_pipeline(MODEL, TEXTS.spec, optimizer=lambda m: sgd(m, lr), stages=STAGES, numerics=numerics)
    monitor = ReconstructionMonitor(pipeline)
    monitor._every = 1
    with pipeline.hooks.attached(monitor):
        pipeline.train(TEXTS, 8)
    return pipeline, monitor


def test_the_monitor_compares_streams_only_and_exact_streams_take_ids() -> None:
    for numerics, limits in ((Numerics(), (0, 1e-5)), (FEW, (0.01, 0.3)), (Numerics(exact_streams=True), (-1, 0))):
        _, monitor = watched(numerics, 0.0)
        error = max(monitor.errors.values())
        assert limits[0] < error <= limits[1], numerics
    assert watched(Numerics(), 0.05)[1].errors[0] > 1e-4  # weights that change


def test_a_run_without_ids_would_be_wrong() -> None:
    """The error of x̃ if a stage's anchors were those of other tokens: as large as x̃ itself, so ids in bf16 would be noticed."""
    torch.manual_seed(0)
    layer, z = MODEL.build_block(1, 0), [torch.randn(BATCH, LENGTH, STREAM) for _ in range(2)]
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(std=0.3) if p.dim() > 1 else None
    tokens = TEXTS.inputs(0).int()
    y = layer(*z, tokens)
    other = layer.inverse(*y[:2], (tokens + 1) % 11)
    assert (other[0] - z[0]).norm() > 0.1 * z[0].norm()
    assert torch.allclose(layer.inverse(*y)[0], z[0], atol=1e-4)
