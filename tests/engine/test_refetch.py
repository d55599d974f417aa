"""Inputs of the first stage that are fetched again: the weights of stored inputs, bit for bit, and no bytes between the passes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petra import ConfigError, Keep, Method, ModelError, Pipeline, Runtime
from petra.data import EvalSource, TrainSource, from_dataset, load_dataset
from petra.plan import make_plan
from petra.settings import Numerics
from petra.training import Checkpoints, restore
from reproduction.stored_memory import ActivationMemory
from tests.support.nets import RandomSource, assert_equal, mixed, mixed_net
from tests.support.refusals import refuses


class Once:
    """Random microbatches that can't be fetched again."""

    inputs, targets = RandomSource().inputs, RandomSource().targets


class Again(RandomSource):
    """Random microbatches. The numbers of those that are fetched again are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []

    def refetch(self, m: int) -> Tensor:
        self.fetched.append(m)
        return super().refetch(m)


def pipeline(refetch: bool, method: str | Method = "petra", **options: Any) -> Pipeline:
    return mixed(0.1, method=method, runtime=Runtime(refetch=refetch), **{"k": 2, "seed": 4, **options})


SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("petra", "delayed")},
    "two versions": {"method": "pipedream_2bw", "k": 11},
    "several blocks in a stage": {"stages": [3, 3]},
    "flush": {"method": Method("flushed", 1, Keep.INPUT, flush=True)},
    "int8": {"method": "dsp", "numerics": Numerics(stored_format="int8")},
    "bf16, channels-last": {"numerics": Numerics(autocast=torch.bfloat16, channels_last=True)},
    "exact streams": {"numerics": Numerics(exact_streams=True)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_those_of_stored_inputs(name: str, tmp_path: Path) -> None:
    """A run with an evaluation, of a network with dropout and batch normalisation; it resumes from the run with stored inputs."""
    found = {}
    for refetch in (False, True):
        made, source = pipeline(refetch, **SETTINGS[name]), Again()
        assert made.plan.stages[0].keeps[0] is (Keep.REFETCH if refetch else Keep.INPUT)
        with ActivationMemory(made).attached() as memory:
            results = [made.train(source, 15), made.evaluate(Once(), 2)]
        if name == "petra":
            assert memory.peaks[0] == 11 * source.spec.bytes * (not refetch), "2(J − 1) + 1 inputs, or none"
        assert made.stages[0].stored_bytes() == 0
        if refetch:
            restore(made, tmp_path / f"{15:09}")
        else:
            Checkpoints(tmp_path).save(made, {}, None)
        results.append(made.train(source, 8))
        assert source.fetched == [*range(23)] * refetch
        found[refetch] = made.state_dict(), results
    assert_equal(found[True][0], found[False][0])
    assert found[True][1] == found[False][1]


def test_only_a_first_block_that_would_store_several_inputs_refetches() -> None:
    net, spec = mixed_net(), RandomSource().spec

    def first(method: str | Method, **options: Any) -> Keep:
        plan = make_plan(net, spec, method=method, refetch=True, **options)
        assert plan.refetches == (plan.stages[0].keeps[0] is Keep.REFETCH)
        assert Keep.REFETCH not in [keep for stage in plan.stages for keep in stage.keeps][1:]
        return plan.stages[0].keeps[0]

    assert first("petra") is Keep.REFETCH
    assert first("reversible") is Keep.INPUT  # one microbatch in flight
    assert first("petra", stages=1) is Keep.INPUT
    assert first("1f1b") is Keep.GRAPH
    with pytest.raises(ConfigError, match="keep: expected graph, input or nothing, got refetch"):
        Method("own", 2, Keep.REFETCH)


class Wrong(Again):
    """Fetches another number of rows again."""

    def refetch(self, m: int) -> Tensor:
        return self.inputs(m)[:1]


test_sources_that_cannot_be_fetched_again_are_refused = refuses(
    lambda source: pipeline(True).train(source, 12),
    (Once(), r"data: expected a source with a method refetch\(m\), .*, got Once"),
    (Wrong(), "the data of microbatch 0: expected "),
    kind=(ConfigError, ModelError),
)


@pytest.mark.parametrize("workers", [0, 2])
def test_sources_return_the_same_inputs_again(workers: int) -> None:
    """With the same augmentation, also where inputs are read with targets, and in a replica's share."""
    rows, kept = [(torch.rand(3), m) for m in range(20)], []

    class Noisy:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return rows[i][0] + torch.rand(3), rows[i][1]

    for split in (load_dataset("digits").train, from_dataset(Noisy())):
        for share in (slice(None), slice(2, 4)):
            source = TrainSource(split, 4, seed=2, workers=workers, share=share)
            kept.append(source)  # its workers end with the test
            first = [source.inputs(m).clone() for m in range(6)]
            assert all(torch.equal(source.refetch(m), first[m]) for m in range(6))
            assert first[0].shape[0] == len(range(4)[share])
    assert torch.equal((test := EvalSource(load_dataset("digits"), 4)).refetch(1), test.inputs(1))
