"""A plain run is plain: few frames between ``Pipeline.train`` and a block's function, no collective and no hook."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

import petra
from petra import BlockSpec, Model, Pipeline, Recipe, Runtime, TensorSpec
from petra.engine import checks
from petra.engine.options import checked_inverse
from petra.reversible import Coupling
from tests.support.commands import TINY, train
from tests.support.nets import sgd

PETRA = str(Path(petra.__file__).parent)


def depth(frame: FrameType | None) -> int:
    """Return the number of frames of petra from a frame out to ``Pipeline.train``, both included; 0 in a check."""
    count = 0
    while frame is not None and frame.f_code is not Pipeline.train.__code__:
        if frame.f_code.co_filename in (checks.__file__, checked_inverse.__file__):
            return 0
        count += frame.f_code.co_filename.startswith(PETRA)
        frame = frame.f_back
    return count + 1 if frame is not None else 0


class Function(nn.Linear):
    """Records from how deep a call it is evaluated."""

    depths: set[int] = set()  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        self.depths.add(depth(sys._getframe(1)))
        return super().forward(x)


class Ends(nn.Linear):
    def forward(self, *x: Tensor) -> Any:
        y = super().forward(torch.cat(x, 1))
        return (y, y) if len(x) == 1 else y


class Data:
    def inputs(self, m: int) -> Tensor:
        return torch.full((2, 8), float(m))

    def targets(self, m: int) -> Tensor:
        return torch.zeros(2, dtype=torch.int64)


def test_eight_frames_and_nothing_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("a collective in a run of one process")

    for name in ("all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast"):
        monkeypatch.setattr(dist, name, forbidden)
    couplings = [BlockSpec(f"c{i}", lambda: Coupling(Function(8, 8))) for i in range(2)]
    blocks = BlockSpec("stem", lambda: Ends(8, 8)), *couplings, BlockSpec("head", lambda: Ends(16, 4))
    pipeline = Pipeline(Model("plain", blocks), TensorSpec((2, 8), torch.float32), Recipe(sgd), runtime=Runtime(), k=2)
    Function.depths.clear()
    pipeline.train(Data(), 6)
    assert not pipeline.hooks
    assert Function.depths == {0, 8}, "0 in checks of the first microbatch"
    assert {type(runner).__name__ for stage in pipeline.stages.values() for runner in stage.runners} == {
        "Recompute",
        "Reconstruct",
        "KeepGraph",
    }
    parts = [[type(part).__name__ for part in worker.update.parts] for worker in pipeline.workers.values()]
    assert parts == [["GradientNorm", "FiniteCheck", "OptimizerStep"]] * 4


def test_ten_frames_in_petra_train(tmp_path: Path) -> None:
    functions, found = set[int](), set[int]()

    def seen(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, Coupling):
            functions.add(id(module.f))
        elif id(module) in functions:
            found.add(depth(sys._getframe(1)))

    hook = register_module_forward_pre_hook(seen)
    try:
        train("experiment=demo", *TINY, "schedule.milestones=null", "checkpoint.keep=0", f"run_dir={tmp_path}/run")
    finally:
        hook.remove()
    assert found == {0, 9}, "0 in checks and evaluation; one more than in a plain run, for the warning about reconstruction errors"
