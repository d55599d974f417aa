"""Predictions for new images, segmentation runs from a configuration, and the process group's end."""

import gc
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from launch import evaluate, export, generate, predict
from launch.config.compose import compose_overrides
from launch.run.build import set_up
from launch.run.resume import Start, load_start
from launch.run.weights import SavedWeights
from launch.run.weights import evaluate as evaluate_weights
from launch.runtime.rank import Process
from petra.data import load_dataset
from petra.models import revnet18
from petra.pipeline import Pipeline
from petra.training import facts_in, load, newest, read_rows
from tests.support.commands import refused, train
from tests.support.forked import Forked
from tests.support.processes import run_processes

RUN = (
    *("data=digits", "model=revnet18", "model.width=0.125", "k=2", "data.batch_size=64", "trainer.epochs=1"),
    "trainer.limit_batches=4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short run on digits."""
    folder = tmp_path_factory.mktemp("predict") / "run"
    train(*RUN, "trainer.device=cpu", f"run_dir={folder}", "trainer.export=pt")
    return folder


def test_predictions_equal_those_of_the_network_on_the_data_set(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = load_dataset("digits").test
    assert test.inputs is not None
    normalised = test.inputs(torch.arange(3), None)
    prepared = facts_in(folder / "model.pt")["preparation"]
    mean, std = (255 * torch.tensor(values).view(-1, 1, 1) for values in prepared["moments"])
    network = revnet18(width=0.125).build(0)
    network.load_state_dict(load(folder / "model.pt"))
    expected = network.eval()(normalised).softmax(1).max(1)
    lines = []
    for i, image in enumerate(normalised):
        pixels = (image * std + mean).round().to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        lines.append(f"{tmp_path}/{i}.png: class {expected.indices[i]}, {expected.values[i]:.1%}\n")
    for weights in (folder / "model.pt", newest(folder / "checkpoints")):
        predict.main([f"{folder}", f"--weights={weights}", *(f"{tmp_path}/{i}.png" for i in range(3))])
        assert capsys.readouterr().out == "".join(lines)


def test_a_file_may_have_an_equals_sign_in_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("label=cat").mkdir()
    names = ["label=cat/1.png", "a=b.png", "data.root=x.png", "k=1.png"]
    for name in names:
        Image.new("RGB", (8, 8)).save(name)
    with suppress(SystemExit):
        predict.main([str(folder), *names, "trainer.device=cpu"])
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == names
    assert refused(predict.main, [str(folder), "a=b.png", "data.rot=x"]) == "data.rot: no such key; did you mean data.root?"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (predict, "{folder}/config.yaml", "{folder}/config.yaml: can't be read as a JPEG or PNG image"),
        (predict, "data.size=16 x.png", "data.size: expected 32, as the run prepared its images, got 16"),
        (predict, "x.png trainer.device=cuda", "trainer.device: expected cpu, or a GPU for each process, got cuda with 1 process"),
        (
            predict,
            "x.png trainer.precision=bf16",
            "trainer.precision: expected nothing, since the command uses model, data.size, trainer",
        ),
        (predict, "x.png data.batch_size=3", "data.batch_size: expected nothing, since the command uses model, data.size, trainer"),
        (evaluate, "dp=2", "dp: expected nothing, since the command uses model, data, method, seed, trainer.stages, "),
        (evaluate, "trainer.transport=edge", "trainer.transport: expected nothing, since the command uses model, "),
        (evaluate, "optim.average=0.9", "optim.average: expected nothing, since the command uses model, data, "),
        (
            generate,
            "trainer.device=cuda",
            "trainer.device: expected nothing, since the command uses model, data of a configuration",
        ),
        (export, "--huggingface=new data.size=8", "data.size: expected nothing, since the command uses model of a configuration"),
        (predict, "--weights={folder}/none.pt x.png", "{folder}/none.pt: cannot be read as exported weights"),
    ],
)
def test_invalid_words_are_errors_in_one_line(
    command: ModuleType, words: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    error = refused(command.main, [str(folder), *words.format(folder=folder).split()])
    assert error.startswith(message.format(folder=folder))


def test_weights_that_are_not_finite_predict_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {key: value * float("nan") if value.is_floating_point() else value for key, value in load(folder / "model.pt").items()}
    monkeypatch.setattr(SavedWeights, "read", lambda weights: state)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    error = refused(predict.main, [f"{folder}", str(tmp_path / "a.png")])
    expected = f"weights that give finite scores for {tmp_path}/a.png, got scores that are not finite"
    assert error == f"{folder}/model.pt: expected {expected}"


def _note_pipelines(rank: int) -> None:
    """Write how many pipelines are alive when the default process group is destroyed."""
    destroy = dist.destroy_process_group

    def noted() -> None:
        alive = sum(isinstance(o, Pipeline) for o in gc.get_objects())
        Path(f"alive{rank}.json").write_text(json.dumps(alive))
        destroy()

    dist.destroy_process_group = noted  # type: ignore[assignment]


@pytest.mark.processes
def test_pipelines_end_before_their_process_group(tmp_path: Path) -> None:
    """The groups of replicas would otherwise sometimes abort the process."""
    words = ("data=synthetic", "data.images=32", "data.batch_size=8", "data.size=16", "model.width=0.0625", "trainer.epochs=1")
    with Forked(tmp_path, [*words, "dp=2", "trainer.device=cpu", "run_dir=run"], 2, prepare=_note_pipelines) as run:
        run.finish()
    assert [json.loads((tmp_path / f"alive{rank}.json").read_text()) for rank in range(2)] == [0, 0]


def read(rank: int, folder: Path) -> tuple[str, str]:
    """Return which weights an evaluation and ``init_from`` read, though each process finds other ones."""
    found, process = SavedWeights([folder / "model.pt", newest(folder / "checkpoints")][rank]), Process(rank, 2, rank, 2)  # type: ignore[arg-type]
    config = compose_overrides([*RUN, "trainer.device=cpu", f"init_from={folder}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedWeights, "at", lambda *_: found)
        (loaded,) = load_start(set_up(config, process).pipeline(), config, Start(), 4)
    return evaluate_weights(replace(config, init_from=None), found, process)["weights"], loaded


@pytest.mark.processes
def test_all_processes_read_the_weights_that_the_first_one_has_chosen(folder: Path, tmp_path: Path) -> None:
    """While a run trains, they could otherwise mix two of its checkpoints."""
    (evaluated, loaded), other = run_processes(2, read, tmp_path, folder)
    assert (evaluated, loaded) == other
    assert evaluated == str(folder / "model.pt")
    assert loaded.startswith(f"initial weights of 10 of 10 blocks from {evaluated}, ")


NETWORK = ("model=deeplabv3", "model.body=revnet18", "model.width=0.125", "model.norm=inplace_abn")
SHAPE = ("data=segmentation", "data.classes=3", "data.size=32", "data.height=24", "data.batch_size=4", "data.workers=0")
SEGMENTATION = (*NETWORK, *SHAPE, "trainer.epochs=2", "trainer.device=cpu", "trainer.export=pt", "k=1", "trainer.bootstrap=0.25")


def write_folders(root: Path) -> None:
    """Write images of three colours: the class of a pixel is its colour."""
    for split, count in (("train", 8), ("val", 3)):
        for i in range(count):
            small = np.random.default_rng(i).integers(0, 3, (4, 6), dtype=np.uint8)
            labels = np.kron(small, np.ones((10, 10), np.uint8))
            labels[0] = 255
            for kind, pixels in (("labels", labels), ("images", np.eye(3, dtype=np.uint8)[labels % 3] * 200)):
                path = root / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short run in two processes, with class-uniform sampling."""
    base = tmp_path_factory.mktemp("segmentation")
    write_folders(base / "data")
    words = [*SEGMENTATION, f"data.root={base}/data", "run_dir=run", "trainer.stages=3", "data.sampling=class_uniform"]
    with Forked(base, words, 2) as started:
        started.finish()
    return base / "run"


@pytest.mark.processes
@pytest.mark.parametrize("changes", [[], ["data.batch_size=5"]])
def test_evaluation_repeats_the_last_epochs(segmented: Path, changes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.main([f"{segmented}", *changes])
    found, last = json.loads(capsys.readouterr().out), read_rows(segmented / "metrics.jsonl")[-1]
    assert found["pixels"] == 3 * 39 * 60
    for name in ("loss", "accuracy", "miou"):
        assert found[name] == pytest.approx(last[f"test_{name}"], rel=1e-5)
    shares = [iou for iou in found["iou"].values() if iou is not None]
    assert [*found["iou"]] == ["0", "1", "2"]
    assert found["miou"] == pytest.approx(sum(shares) / len(shares))
