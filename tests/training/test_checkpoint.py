"""Checkpoints: resumed runs equal uninterrupted ones bit for bit, and interrupted or damaged ones leave older ones intact."""

import errno
import json
import os
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.config.compose import compose_overrides
from launch.run.folder import as_data, require_format
from launch.run.resume import require_same
from petra import ConfigError, DataError, PetraError, Pipeline, UpdateRules
from petra.errors import Interrupted
from petra.settings import Numerics
from petra.training import OPTIMIZERS, Checkpoints, JsonLines, Trainer, UpdateMeans, Watcher, best_of, network, newest, restore
from petra.training.checkpoint import MANIFEST, checkpoints
from petra.training.weight_files import read_tensors
from tests.support.nets import RandomSource, assert_equal, mixed, sgd, weights
from tests.support.processes import run_processes
from tests.support.remedies import Remedy

CASES: dict[str, dict[str, Any]] = {
    "petra": {"rules": UpdateRules(average=0.9, loss_scale="dynamic")},
    "adam": {"optimizer": OPTIMIZERS["adam"], "numerics": Numerics(channels_last=True)},
    "double": {"method": "pipedream_2bw", "k": 10},
    "stashed": {"method": "delayed", "optimizer": OPTIMIZERS["nadam"]},
    "rotated": {"optimizer": OPTIMIZERS["basis_rotation"]},
    "muon": {"optimizer": OPTIMIZERS["muon"], "rules": UpdateRules(average=0.9)},
    "difference": {"remedy": Remedy(9, 0.3, "difference", 1.5, True, 0.9)},
    "velocity": {"method": "dsp", "remedy": Remedy(prediction="velocity")},
}


def build(**settings: Any) -> Pipeline:
    return mixed(
        0.2, **{"k": 5, "optimizer": partial(sgd, lr=0.02), "learning_rate": lambda t: 0.02 / (1 + t / 9), "seed": 3, **settings}
    )


@pytest.mark.parametrize(("case", "background"), [*zip(CASES, cycle([True, False]), strict=False)])
def test_a_resumed_pipeline_is_equal_bit_for_bit(case: str, background: bool, tmp_path: Path) -> None:
    """The checkpoint is saved inside an accumulation."""
    data, whole, resumed = RandomSource(), build(**CASES[case]), build(**CASES[case])
    whole.train(data, 12)
    store = Checkpoints(tmp_path, background=background)
    store.save(whole, {"note": case})
    whole.train(data, 11)
    store.wait()
    path = newest(tmp_path)
    assert path is not None
    assert restore(resumed, path) == {"note": case, "clock": 12, "score": None}
    resumed.train(data, 11)
    assert_equal(weights(resumed), weights(whole))
    assert resumed.stage_metrics() == whole.stage_metrics()
    with whole.averaged(), resumed.averaged():
        assert_equal(weights(resumed), weights(whole))


def test_another_partition_loads_every_block(tmp_path: Path) -> None:
    whole, other = build(**CASES["petra"]), build(**CASES["petra"], stages=[1, 3, 2])
    whole.train(RandomSource(), 12)
    Checkpoints(tmp_path).save(whole, {})
    restore(other, tmp_path / "000000012")
    assert_equal(weights(other), weights(whole))
    assert_equal(*([p.grad for _, block in pipeline.blocks() for p in block.parameters()] for pipeline in (other, whole)))
    momenta = [
        [w.update.optimizer.state[p] for w in pipeline.workers.values() for p in w.stage.module.parameters()]  # type: ignore[union-attr]
        for pipeline in (whole, other)
    ]
    assert_equal(*momenta)
    assert other.train(RandomSource(), 11).loss > 0


def train_in_processes(rank: int, folder: Path, saves: bool) -> dict[str, Tensor]:
    """Train 23 microbatches and save after 12 of them, or resume there."""
    pipeline, store = build(), Checkpoints(folder, background=True)
    if saves:
        pipeline.train(RandomSource(), 12)
        store.save(pipeline, {})
    else:
        restore(pipeline, folder / "000000012")
    pipeline.train(RandomSource(), 11)
    store.wait()
    return weights(pipeline)


@pytest.mark.processes
def test_another_number_of_processes_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Three processes save while training continues; one and two processes resume."""
    folder = tmp_path / "checkpoints"
    saved, resumed = (run_processes(n, train_in_processes, tmp_path / str(n), folder, n == 3) for n in (3, 2))
    expected = {k: v for part in saved for k, v in part.items()}
    assert_equal({k: v for part in resumed for k, v in part.items()}, expected)
    assert_equal(train_in_processes(0, folder, False), expected)


def saved(folder: Path, count: int = 2, **options: Any) -> Pipeline:
    pipeline = build()
    store = Checkpoints(folder, **options)
    for _ in range(count):
        pipeline.train(RandomSource(), 2)
        store.save(pipeline, {})
    return pipeline


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Random damage: test_damaged_checkpoints.py."""
    saved(tmp_path)
    for name, file in (("000000004", "0.pt"), ("000000002", MANIFEST)):
        assert newest(tmp_path) == tmp_path / name
        (tmp_path / name / file).unlink()
    with pytest.raises(DataError, match="expected at least one intact checkpoint, got 2 damaged"):
        newest(tmp_path)
    assert f"checkpoint {tmp_path}/000000004: incomplete" in caplog.text
    assert newest(tmp_path / "none") is None


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    pipeline, store = build(), Checkpoints(tmp_path, keep=2)
    for clock, score in enumerate([0.1, 0.7, None, 0.7, 0.3, None]):
        pipeline.microbatches_done = clock
        store.save(pipeline, {}, score)
    assert [int(path.name) for path in checkpoints(tmp_path)] == [5, 4, 1]
    assert best_of(tmp_path) == tmp_path / "000000001"
    pipeline.microbatches_done = 3  # the run resumed from an earlier one, as later ones are damaged
    Checkpoints(tmp_path, keep=1).save(pipeline, {}, 0.2)
    assert [int(path.name) for path in checkpoints(tmp_path)] == [5, 4, 3, 1]
    with pytest.raises(ConfigError, match=r"checkpoint\.keep: expected an integer >= 0, got -1"):
        Checkpoints(tmp_path, keep=-1)


class Epochs(RandomSource):
    """Random microbatches in epochs of 11, which is a multiple of neither k nor the checkpoint interval."""

    batches_per_epoch, batches = 11, 2
    unit, bytes_per_target = "images", None


def trainer(folder: Path, pipeline: Pipeline | None = None, *, batches: int = 11, every: int | None = 4, **options: Any) -> Trainer:
    data = Epochs()
    data.batches_per_epoch = batches
    options = {
        "checkpoints": Checkpoints(folder / "c", 9, every=every),
        "watchers": [JsonLines(folder / "metrics.jsonl")],
        **options,
    }
    return Trainer(pipeline or build(), data, data, **options)  # type: ignore[arg-type]


def rows(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key} for row in found]


def test_metrics_and_epochs_resume_from_any_checkpoint(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.fit(2)
    expected = rows(tmp_path)
    assert [int(path.name) for path in checkpoints(tmp_path / "c")] == [22, 20, 16, 12, 11, 8, 4]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "torn')
    for clock in (8, 11, 16, 22):
        pipeline = build()
        state = restore(pipeline, tmp_path / "c" / f"{clock:09}")["trainer"]
        log = JsonLines(tmp_path / "metrics.jsonl", state["history"])
        resumed = trainer(tmp_path, pipeline, checkpoints=Checkpoints(tmp_path / "none", 0, every=4), watchers=[log])
        resumed.resume(state)
        resumed.fit(2)
        assert rows(tmp_path) == expected
        assert_equal(weights(pipeline), weights(whole.pipeline))


def test_what_is_loaded_is_intact_and_of_this_k(tmp_path: Path) -> None:
    """Also where the number of updates agrees with that of another k."""
    for k, clock in ((2, 3), (4, 4)):
        pipeline = build(k=k)
        pipeline.train(RandomSource(), clock)
        Checkpoints(tmp_path).save(pipeline, {})
        path = tmp_path / f"{clock:09}"
        with pytest.raises(DataError, match=f"expected 1 updates after {clock} microbatches, with k=3, got 1, the last one after"):
            restore(build(k=3), path)
        restore(build(k=k), path)
        content = bytearray((path / "0.pt").read_bytes())
        content[len(content) // 2] ^= 1
        (path / "0.pt").write_bytes(content)
        for read in (lambda: restore(build(k=k), path), lambda: network(path)):  # noqa: B023
            with pytest.raises(DataError, match=r"damaged, 0\.pt has"):
                read()


def test_watchers_have_states_of_their_own(tmp_path: Path) -> None:
    class Own(Watcher):
        def state(self) -> dict[str, Any]:
            return {"history": []}

    with pytest.raises(PetraError, match="watchers: expected states with names that nothing else has, got history"):
        trainer(tmp_path, watchers=[Own()])
    state = trainer(tmp_path, every=None).state()
    with pytest.raises(DataError, match="pipeline: expected the one that was restored at microbatch 7, got 0"):
        trainer(tmp_path).resume(state | {"clock": 7})


def test_rows_of_microbatches_that_are_trained_again_are_removed(tmp_path: Path) -> None:
    """And an incomplete last line, before the next row."""
    log, path = JsonLines(tmp_path / "a"), tmp_path / "a"
    for clock in (2, 4, 6):
        log.log({"microbatches": clock})
    with path.open("a") as file:
        file.write('{"microb')
    log.log({"microbatches": 8})
    assert [json.loads(line)["microbatches"] for line in path.read_text().splitlines()] == [2, 4, 6, 8]
    means = [UpdateMeans(every, 1, build().recipe, [log]) for every in (2, 4)]
    assert len({key for mean in means for key in mean.state()}) == 2
    means[0].resume({"updates": [1.0, 2.0, 3.0]}, 5)  # of an older checkpoint
    assert [*means[0].state().values()] == [[1.0, 2.0, 3.0]]
    assert [json.loads(line)["microbatches"] for line in path.read_text().splitlines()] == [2, 4]


def test_a_failed_write_in_the_background_ends_the_run_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drains in the middle of the second epoch, although nothing is to be saved there."""
    store = Checkpoints(tmp_path / "c", background=True)
    failing = trainer(tmp_path, every=None, batches=400, checkpoints=store)

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("petra.training.checkpoint.torch.save", fail)
    with pytest.raises(PetraError, match=r"checkpoint .*/000000400: cannot be written \(No space left on device\)") as ended:
        failing.fit(2)
    assert 400 < failing.pipeline.microbatches_done < 800
    assert any("last drained after microbatch" in note for note in ended.value.__notes__)
    assert not store.failed


def test_a_run_without_planned_drains_stops_at_once(tmp_path: Path) -> None:
    """It stops in the middle of an epoch and resumes there."""
    asked = iter([False] * 20)
    stopped = trainer(tmp_path, every=None, batches=200, stop=lambda: next(asked, True))
    with pytest.raises(Interrupted, match="checkpoint written") as ended:
        stopped.fit(1)
    assert 20 < ended.value.clock < 60
    resumed = trainer(tmp_path, every=None, batches=200)
    resumed.resume(restore(resumed.pipeline, newest(tmp_path / "c"))["trainer"])
    assert resumed.state()["sums"][0] == 4 * ended.value.clock
    (epoch,) = resumed.fit(1)
    assert epoch["microbatches"] == 200


def test_another_configuration_is_an_error() -> None:
    found = {"k": 4, "data": {"root": "a", "name": "digits"}, "trainer": {"stages": 3, "precision": "bf16"}}
    same = {"k": 4, "data": {"root": "b", "name": "digits"}, "trainer": {"stages": 2, "precision": "bf16"}}
    require_same(found, same, Path("c"))
    for new, message in (
        (
            {"trainer": {"precision": "float32"}},
            r"trainer\.precision: expected bf16 as in c, which the run resumes from \(.*\), got float32",
        ),
        ({"k": 2}, r"k: expected 4 as in .*, got 2"),
        ({"new": 1}, "new: expected None as in .*, got 1"),
        *(
            ({group: {**same.get(group, {}), "new": 1}}, rf"{group}\.new: expected None as in .*, got 1")  # unless it is marked
            for group in ("model", "data", "method", "remedy", "optim", "schedule", "trainer")
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            require_same(found, same | new, Path("c"))


def test_replicas_that_train_apart_are_as_many_as_in_the_checkpoint() -> None:
    """Each has its own samples, weights and optimizer. With sums at every update, results are those of any number."""
    for words, refused in ((["outer=diloco"], True), ([], False)):
        found, wanted = (as_data(compose_overrides(["data=synthetic", f"dp={dp}", *words])) for dp in (4, 2))
        with pytest.raises(ConfigError, match=r"^dp: expected 4 as in c, .*, got 2$") if refused else nullcontext():
            require_same(found, wanted, Path("c"))


def test_a_run_resumes_after_petra_has_gained_an_argument_and_a_group() -> None:
    """A configuration that lacks ``model.head`` and ``outer`` was written when there was only one head, and no outer step."""
    words = ["model=revgpt", "data=text"]
    found = as_data(compose_overrides(words))
    del found["model"]["head"], found["outer"]
    found = require_format(found, Path("c"))
    assert not require_same(found, as_data(compose_overrides(words)), Path("c"))
    for key, before, now in (("model.head", "concat", "sum"), ("outer.every", "0", "4")):
        with pytest.raises(ConfigError, match=rf"{key}: expected {before} as in c, .* got {now}"):
            require_same(found, as_data(compose_overrides([*words, f"{key}={now}"])), Path("c"))


def test_a_checkpoint_holds_what_belongs_to_tensors_and_older_ones_are_refused(tmp_path: Path) -> None:
    """``torch.save`` writes whole storages, of which a tensor may be a small part."""
    saved(tmp_path, count=1)
    folder = tmp_path / "000000002"
    tensors = torch.load(folder / "0.pt")
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in tensors.values())
    assert read_tensors(folder, lambda key: key.endswith("weight")).keys() == {key for key in tensors if key.endswith("weight")}
    (folder / "0.pt").rename(folder / "__0_0.distcp")
    with pytest.raises(DataError, match=r"000000002: expected a checkpoint of this version, with files \*\.pt \(commit \w+ reads"):
        read_tensors(folder, lambda key: True)
