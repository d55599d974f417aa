"""Valid and invalid configurations, and whole runs in one process and under torchrun."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from docs.reference import rows_of
from launch.config.catalogue import configurations
from launch.config.compose import command_line_configs, compose_overrides
from launch.config.schema import GROUPS, SECTIONS
from launch.run.build import learning_rate
from launch.run.data import data_sources
from launch.runtime.rank import Process
from petra import ConfigError, PetraError, TensorSpec
from petra.data import Dataset, TrainSource, load_dataset
from petra.plan.layout import Layout
from petra.staleness import Correction, Discount
from tests.support.commands import TINY, lines, planned
from tests.support.forked import Forked
from tests.support.processes import PIPES, environment, run_processes
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("shared_profiles")

SEGMENTATION = ("segmentation", "camvid", "cityscapes", "vistas", "cocostuff")


def test_defaults_are_the_papers_recipe() -> None:
    result = planned()
    assert (result.plan.method.delay, result.plan.k, len(result.plan.stages), result.plan.numerics.autocast) == (2, 4, 10, None)
    rate = learning_rate(result.config, 100)
    assert rate(500) == pytest.approx(0.1 * 64 * 4 / 256)
    assert [rate(t) / rate(500) for t in (1, 15_001, 22_501)] == pytest.approx([1 / 500, 0.1, 0.01])


@pytest.mark.parametrize("group", [Path(group, name) for group in SECTIONS for name in configurations(group)], ids=str)
def test_every_file_of_every_group_works(group: Path) -> None:
    if group.stem == "wandb" and find_spec("wandb") is None:
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[wandb\]'"):
            planned("logger=wandb")
    elif group.parent.name == "data" and group.stem in SEGMENTATION:
        assert planned(f"data={group.stem}", "model=deeplabv3").plan.inputs.shape[1] == 3
    elif group.stem == "deeplabv3":
        assert planned("data=segmentation", "model=deeplabv3").plan.inputs == TensorSpec((8, 3, 512, 512), torch.float32)
    elif group.parent.name == "data" and group.stem in ("text", "tokens"):
        assert planned(f"data={group.stem}", "model=revgpt").plan.inputs.dtype == torch.int64
    elif group.stem == "huggingface":
        with pytest.raises(ConfigError, match=r"model\.path: expected a text, got nothing"):
            planned("data=text", "model=huggingface")
    elif "gpt" in group.stem:
        assert planned("data=text", f"model={group.stem}").plan.inputs == TensorSpec((64, 256), torch.int64)
    else:
        planned(f"{group.parent}={group.stem}", "k=9")  # PipeDream-2BW needs k >= the delay of stage 1


def test_every_key_has_a_meaning() -> None:
    for group in ("", *GROUPS):
        assert not [name for name, row in rows_of(group).items() if not row.meaning and name != "_target_"]


def test_remedies_are_built_in_microbatches_and_those_outside_the_package_are_named_by_target() -> None:
    assert planned("remedy=pipemare").recipe(100).extensions == (Discount(500), Correction(0.135))
    for remedy, method in (("braking.Braking", "petra"), ("dc_asgd.DelayCompensation", "delayed")):
        (found,) = planned(f"method={method}", f"remedy._target_=examples.remedies.{remedy}").recipe(100).extensions
        assert type(found).__name__ == remedy.partition(".")[2]
    assert planned("remedy._target_=petra.staleness.Feedback").config.remedy.name == "petra.staleness.Feedback"


test_invalid_values = refuses(
    lambda override: planned(*override.split()),
    ("k=0", "k: expected an integer >= 1, got 0"),
    ("data._target_=mnist", "data._target_: expected .*digits, .* or module.function of your own, got mnist"),
    ("data.root=folder", "data.root: expected null for digits, which has the options none, got folder"),
    ("model._target_=petra.models.revnet99", r"model._target_: expected petra\.models\.revnet\d+, .*, got petra"),
    ("method.delay=[1,2]", "method.delay: expected one delay, or 9 for 10 stages, got 2 delays"),
    ("method=paci", "k: expected an integer >= 9 with method.max_updates=1, got 4"),
    ("method=pipedream_2bw", "k: expected an integer >= 9 with method.weights=double .*, got 4"),
    ("method.fill=true", "method.fill: expected false with method.flush=false, got true"),
    ("schedule.milestones=[3,2]", "schedule.milestones: expected increasing epochs >= 1, got"),
    ("optim.momentum=0", "optim.nesterov: expected false with optim.momentum=0, got true"),
    ("trainer.stages=11", "stages: expected 1 to 10, .*, got 11"),
    ("method.delay=1000000000", "method.delay: expected at most 10000 in total, got 9000000000"),
    ("optim=muon remedy=prediction", r"optim: expected adam, .*, which remedy\.prediction requires, got muon"),
    ("method.keep=[graph,input]", "method.keep: expected one value, or 10, one per block, got 2 values"),
    ("method.delay=auto method.fill=true method.flush=true", "method.delay: expected an integer >= 0 with method.fill=true"),
    ("remedy._target_=petra.staleness.Feedback remedy.discount=5", "remedy.discount: expected 0 with petra.staleness.Feedback"),
    ("outer.lr=0.3", "outer.lr: expected 0.7 with outer.every=0, without outer steps, got 0.3"),
    ("outer.format=int8", "outer.format: expected null with outer.every=0, without outer steps, got int8"),
    ("outer=streaming outer.every=0 outer.overlap=0", "outer.lr: expected 0.7 with outer.every=0, .*, got 0.4"),
    ("outer.staggered=true", "outer.staggered: expected false with outer.every=0, .*, got true"),
    ("optim.clip=1 optim.clip_globally=true", "optim.clip_globally: expected false with method.delay=2"),
    ("optim.loss_scale=8", "optim.loss_scale: expected null with trainer.precision=float32, got 8"),
    ("trainer.memory_limit=2", "trainer.memory_limit: expected null, or a number > 0 with .*, got 2"),
    ("init_skip=[head]", r"init_skip: expected null without init_from, got \['head'\]"),
    ("resume_change=[k]", r"resume_change: expected null without resume, got \['k'\]"),
    ("data=text model=revnet18", "model: expected gpt, revgpt or huggingface with data=text, got revnet18"),
    ("model=deeplabv3", "model: expected a model of images with data=digits, got deeplabv3"),
    ("data=segmentation model=deeplabv3 data.size=30", "data.height: expected a multiple of 8 with model=deeplabv3, got 30"),
    ("data=cityscapes model=deeplabv3 data.void=3", "data.void: expected null for cityscapes, .*, got 3"),
    ("trainer.bootstrap=0.5", "trainer.bootstrap: expected null with data=digits, which has no pixels, got 0.5"),
)


def read(override: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["launch.train", override])
        command_line_configs()


test_errors_of_hydra_are_one_line = refuses(
    read,
    ("k=[1", "command line: expected an override in Hydra's syntax, got k=[1 (no viable alternative at input '[1')"),
    ("k=${missing}", "k: Interpolation key 'missing' not found"),
    ("k=1,2", "k=1,2: several values; add --multirun to train with each, or quote a value that contains commas: "),
    ("run_dir=ä,(✓", "run_dir: expected a value in Hydra's syntax; quote it twice in the shell: \"run_dir='ä,(✓'\", got ä,(✓"),
    ("trainer.epoch=3", "trainer.epoch: no such key; did you mean trainer.epochs?"),
    ("epochs=3", "epochs: no such key; did you mean trainer.epochs?"),
    ("modle=revnet18", "modle: no such key; did you mean model?"),
    ("experiment=petra/quickk", r"experiment: expected petra/quick or another name \(cifar10_short, "),
)


@pytest.mark.parametrize("value", ["abc", "0", "", "-1", "2.5"])
def test_a_number_of_threads_that_openmp_ignores_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take all cores, and results are equal bit for bit only for the same number."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(
        ConfigError, match=f"^environment variable OMP_NUM_THREADS: expected an integer >= 1, got {value or 'nothing'}$"
    ):
        planned()
    for accepted in ("2", "4,3,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", accepted)
        planned()


def test_a_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    third = Process(rank=3, world=4, local_rank=1, local_world=2)
    assert third.device("auto") == torch.device("cuda", 1)
    assert third.device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each process sees its own
    assert third.device("auto") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"expected cpu, or a GPU for each process, got auto with 3 process\(es\) and 2 GPU\(s\)"):
        Process(rank=0, world=3, local_rank=0, local_world=3).device("auto")


def _loaded(rank: int, roots: list[str]) -> tuple[object, ...]:
    """Return whether this one of four ranks, which are two replicas, opened the file, and its data."""
    opened = False

    def load(*args: object, **options: object) -> Dataset:
        nonlocal opened
        opened = True
        return load_dataset("text", root=roots[rank], size=8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.run.data.built", load)
        config = compose_overrides(["data=text", "data.root=x", "data.batch_size=4", "data.size=8"]).data
        parts = (range(1), range(1, 2))
        layout = Layout((), parts, parts, TensorSpec((2, 8), torch.int64), 2)
        try:
            train, test = data_sources(config, 5, layout)
        except PetraError as error:
            return opened, str(error)
    read = []
    for stream in (train.inputs, test.inputs, train.targets, test.targets):
        try:
            read.append(stream(1))
        except AssertionError:
            read.append(None)
    return opened, train.batches_per_epoch, test.batches, *read


@pytest.mark.processes
def test_each_replica_reads_its_share_and_they_must_have_the_same_data(tmp_path: Path) -> None:
    """Two versions of a data set are refused, whose numbers of samples may be the same."""
    first, other, more, new = (str(tmp_path / name) for name in ("letters.txt", "others.txt", "more.txt", "new.txt"))
    for path, start, copies in ((first, 1, 2), (other, 1, 2), (more, 1, 3), (new, 50, 2)):
        Path(path).write_bytes(bytes(range(start, start + 200)) * copies)
    streams_of = {path: TrainSource(load_dataset("text", root=path, size=8), 4, seed=5) for path in (first, other)}
    parts = run_processes(4, _loaded, tmp_path / "processes", [first, "", other, ""])
    assert [part[0] for part in parts] == [True, False, True, False]
    for replica, path in enumerate((first, other)):
        reader, last = parts[2 * replica : 2 * replica + 2]
        assert torch.equal(reader[3], streams_of[path].inputs(1)[2 * replica :][:2])
        assert torch.equal(last[5], streams_of[path].targets(1))
    kept = "44 training samples and 5 test samples"
    for path, found in ((more, "67 training samples and 8 test samples"), (new, kept)):
        (text,) = {text for _, text in run_processes(4, _loaded, tmp_path / f"differing{path[-5]}", [first, "", path, ""])}
        assert re.fullmatch(f"data.root: expected {kept}, contents \\w+ as on rank 0, got {found}, contents \\w+ on rank 2", text)


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics that don't depend on time."""
    wall = ("seconds", "images_per_second")
    return [{key: value for key, value in row.items() if key not in wall} for row in lines(folder / "metrics.jsonl")]


RECORDS = {".lock", "config.yaml", "metrics.jsonl", "updates.jsonl", "summary.json", "report.html", "checkpoints"}


@pytest.mark.processes
def test_two_processes_give_the_numbers_of_one_and_leave_all_records(tmp_path: Path) -> None:
    for processes in (1, 2):
        with Forked(tmp_path / "cwd", [*TINY, f"run_dir={tmp_path}/{processes}"], processes) as run:
            printed, _ = run.finish()
        assert printed.count("epoch 1/1: loss ") == 1
    assert metrics(tmp_path / "1") == metrics(tmp_path / "2")
    assert len(metrics(tmp_path / "1")) == 1

    folder = tmp_path / "2"
    assert {p.name for p in folder.iterdir()} == RECORDS
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2", "cwd"}
    assert {p.name for p in (tmp_path / "cwd").iterdir() if p.is_file()} == {"out0", "out1", "err0", "err1"}
    summary = json.loads((folder / "summary.json").read_text())
    found = {key: summary[key] for key in ("method", "delay", "model", "stages", "processes", "transport", "k", "epochs")}
    assert found == dict(method="petra", delay=2, model="revnet18", stages=10, processes=2, transport="lockstep", k=4, epochs=1)
    assert {"parameters", "microbatches", "train_loss", "test_accuracy", "images_per_second", "wall_seconds"} <= summary.keys()
    assert summary["microbatches"] == 8
    assert len(summary["peak_memory_bytes"]) == 2


@pytest.mark.processes
def test_an_error_is_reported_once_under_torchrun(tmp_path: Path) -> None:
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m launch.train data=cifar10 data.root=nowhere"
    failed = subprocess.run([sys.executable, *torchrun.split()], cwd=tmp_path, env=environment(), **PIPES)
    assert failed.returncode != 0
    assert failed.stderr.count("data_batch_1: can't be read") == 1
    assert "launch/" not in failed.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_processes_that_are_more_than_blocks_are_idle(tmp_path: Path) -> None:
    """RevNet-18 has ten blocks. Automatic stages are one for each block then."""
    words = ["data.size=16", "data.images=32", "trainer.stages=auto", "method.delay=auto", f"run_dir={tmp_path}/run"]
    with Forked(tmp_path / "cwd", [*TINY, *words], 12) as run:
        printed, _ = run.finish()
    assert "10 stages in 12 process(es)" in printed
    assert "; 2 process(es) without a stage are idle; " in printed
    assert len(metrics(tmp_path / "run")) == 1
