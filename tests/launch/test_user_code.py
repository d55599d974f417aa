"""Code of users in blocks that does not fit reversible passes, through ``petra train`` and in several processes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launch.config.compose import compose_overrides
from launch.run.build import model_of
from launch.run.data import load as load_data
from petra import BlockSpec, Model, ModelError
from petra.data import Dataset, Split
from petra.reversible import Coupling
from petra.training import load
from tests.engine.test_any_block import FLAT, Halves, Vectors, linear
from tests.engine.test_user_faults import Late, Own
from tests.support import commands
from tests.support.nets import make_pipeline, sgd
from tests.support.processes import run_processes


class LateDraw(nn.Linear):
    """Draws a mask in about half of the microbatches."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        return F.dropout(y, 0.5) if not x.is_meta and x[0, 0] > 0 else y


class Growing(nn.Linear):
    """Changes its weight in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(1.01)
        return super().forward(x)


class Head(nn.Linear):
    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return super().forward(torch.cat([x1, x2], dim=1))


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.clone()


def network(classes: int, size: int, fault: str) -> Model:
    """Return a model for the command line."""
    made: dict[str, Callable[[], nn.Module]] = {
        "own": lambda: Own(nn.Linear(size, size)),
        "late": lambda: Coupling(LateDraw(size, size)),
        "growing": lambda: Coupling(Growing(size, size)),
    }
    blocks = BlockSpec("split", Twice), BlockSpec("c", made[fault]), BlockSpec("head", partial(Head, 2 * size, classes))
    return Model("mine", blocks)


def trained(folder: Path, fault: str, method: str) -> dict[str, Tensor]:
    targets = (f"model._target_={__name__}.network", f"model.fault={fault}", "data._target_=examples.own_functions.rows")
    short = (
        "data.classes=3",
        "data.size=8",
        "data.batch_size=8",
        "trainer.epochs=1",
        "schedule.warmup_epochs=0",
        "trainer.device=cpu",
    )
    commands.train(*targets, *short, f"method={method}", "trainer.device=cpu", "trainer.export=pt", f"run_dir={folder / method}")
    return load(folder / method / "model.pt")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("own", "block c: expected inverse_vjp to reconstruct the input of forward"),
        ("growing", "block c: expected parameters that a forward pass leaves as they are"),
    ],
)
@pytest.mark.parametrize("method", ["petra", "reversible"])
def test_the_command_line_refuses_blocks_whose_passes_do_not_fit(fault: str, expected: str, method: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        trained(tmp_path, fault, method)
    assert str(caught.value).startswith(expected)


def test_the_command_line_draws_the_same_late_masks_in_both_passes(tmp_path: Path) -> None:
    """Weights are those of a method that evaluates each block once."""
    found, expected = (trained(tmp_path, "late", method) for method in ("reversible", "backprop"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def drawn_network(classes: int, size: int) -> Model:
    return Model.of("drawn", {"head": nn.Linear(size, classes)})


def drawn_rows(size: int) -> Dataset:
    """Return rows whose order in the parts is drawn, as ``torch.utils.data.random_split`` does it."""
    order = torch.randperm(40)
    train, test = (
        Split(len(part), lambda i, seed, part=part: part[i].float()[:, None], lambda i, seed, part=part: part[i] % 3)
        for part in (order[:32], order[32:])
    )
    return Dataset("drawn", classes=3, size=size, train=train, test=test)


def test_what_a_function_of_the_user_draws_is_the_same_in_all_processes_and_commands() -> None:
    """A split does not depend on the run's seed, the weights of modules do. The generators are left as they were."""
    own = [f"data._target_={__name__}.drawn_rows", f"model._target_={__name__}.drawn_network"]
    config = compose_overrides([*own, "data.classes=3", "data.size=1", "seed=5"])
    torch.manual_seed(9)
    before = torch.get_rng_state()
    dataset, model = load_data(config.data), model_of(config)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    assert torch.equal(dataset.train.inputs(torch.arange(32), None)[:, 0], torch.randperm(40)[:32].float())
    torch.manual_seed(5)
    assert torch.equal(model.build(0).head.weight, nn.Linear(1, 3).weight)  # type: ignore[union-attr,arg-type]


def blocks() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"stem": Halves(), "c0": Coupling(Late()), "c1": Coupling(linear(3, 3)), "merge": Halves(), "head": linear(6, 3)}


def between_calls(rank: int, method: str, own: bool) -> dict[str, Tensor]:
    """Return the weights of this process, after two calls with gradients of its own between them."""
    pipeline = make_pipeline(Model.of("mine", blocks()), FLAT, optimizer=sgd, method=method, k=2)
    for _ in range(2):
        pipeline.train(Vectors(), 6)
        for p in (p for _, block in pipeline.blocks() for p in block.parameters()):
            if own:
                p.square().sum().backward()
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


def test_processes_draw_late_masks_and_set_gradients_aside(tmp_path: Path) -> None:
    parts = run_processes(2, between_calls, tmp_path, "reversible", True)
    found = {key: value for part in parts for key, value in part.items()}
    torch.testing.assert_close(found, between_calls(0, "backprop", own=False), rtol=0, atol=1e-12)
