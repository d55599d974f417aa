"""Predictions for new images, and the process group's end."""

from __future__ import annotations

import gc
import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from launch import predict
from launch.run.weights import Weights
from petra.data import load_dataset
from petra.models import revnet18
from petra.pipeline import Pipeline
from petra.training import facts_in, load, newest
from tests.support.forked import Forked

RUN = (
    *("data=digits", "model=revnet18", "model.width=0.125", "k=2", "data.batch_size=64", "trainer.epochs=1"),
    "trainer.limit_batches=4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short run on digits."""
    base = tmp_path_factory.mktemp("predict")
    with Forked(base, [*RUN, "trainer.device=cpu", "run_dir=run", "trainer.export=pt"], 1) as run:
        run.finish()
    return base / "run"


@pytest.mark.processes
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}"], "error: command line: expected JPEG or PNG files, got none"),
        (["{folder}", "{folder}/config.yaml"], "config.yaml: can't be read as a JPEG or PNG image"),
        (["{folder}", "--weights={folder}/none.pt", "x.png"], "none.pt: cannot be read as exported weights"),
    ],
)
def test_invalid_predictions_are_errors_in_one_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        predict.main([word.format(folder=folder) for word in words])
    err = capsys.readouterr().err
    assert message in err
    assert len([line for line in err.splitlines() if not line.startswith("weights of ")]) == 1


@pytest.mark.processes
def test_weights_that_are_not_finite_predict_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {key: value * float("nan") if value.is_floating_point() else value for key, value in load(folder / "model.pt").items()}
    monkeypatch.setattr(Weights, "read", lambda weights: state)
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    with suppress(SystemExit):
        predict.main([f"{folder}", str(tmp_path / "a.png")])
    printed = capsys.readouterr()
    expected = f"weights that give finite scores for {tmp_path}/a.png, got scores that are not finite"
    chosen, error = printed.err.splitlines()
    assert chosen.startswith(f"weights of {folder}/model.pt, ")
    assert (printed.out, error) == ("", f"error: {folder}/model.pt: expected {expected}")


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
