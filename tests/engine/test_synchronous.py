"""GPipe and 1F1B of the engine against those of torch.distributed.pipelining, on the same model and data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from petra import BlockSpec, Model, Pipeline, TensorSpec
from tests.support.processes import run_processes

K, STEPS, BATCH, FEATURES, CLASSES = 4, 3, 3, 6, 5


class Data:
    """Microbatches drawn from their index."""

    def inputs(self, m: int) -> Tensor:
        return torch.randn(BATCH, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * m))

    def targets(self, m: int) -> Tensor:
        return torch.randint(CLASSES, (BATCH,), generator=torch.Generator().manual_seed(2 * m + 1))


def layer(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.LayerNorm(width), nn.Tanh()).double()


MODEL = Model("layers", tuple(BlockSpec(f"layer{i}", lambda i=i: layer(CLASSES if i == 3 else FEATURES)) for i in range(4)))


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def ours(method: str) -> tuple[dict[str, Tensor], float]:
    pipeline = Pipeline(MODEL, TensorSpec((BATCH, FEATURES), torch.float64), method=method, k=K, stages=2, optimizer=sgd, seed=5)
    result = pipeline.train(Data(), K * STEPS)
    return pipeline.state_dict(), result.loss


def theirs(rank: int, method: str) -> tuple[dict[str, Tensor], float]:
    module = nn.Sequential(*(MODEL.build_block(b, 5) for b in (2 * rank, 2 * rank + 1)))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[method](stage, K, loss_fn=F.cross_entropy)
    optimizer, losses = sgd(module), []
    for step in range(STEPS):
        found: list[Tensor] = []
        batch = range(step * K, (step + 1) * K)
        if rank == 0:
            schedule.step(torch.cat([Data().inputs(m) for m in batch]))
        else:
            schedule.step(target=torch.cat([Data().targets(m) for m in batch]), losses=found)
        losses += [loss.item() for loss in found]
        optimizer.step()
        optimizer.zero_grad()
    state = {
        f"layer{2 * rank + int(i)}.{key}": value
        for i, block in module.named_children()
        for key, value in block.state_dict().items()
    }
    return state, sum(losses) / (K * STEPS)


def both(rank: int) -> dict[str, tuple[tuple[dict[str, Tensor], float], tuple[dict[str, Tensor], float]]]:
    return {method: (ours(method), theirs(rank, method)) for method in ("gpipe", "1f1b")}


@pytest.mark.processes
def test_synchronous_methods_equal_those_of_torch(tmp_path: Path) -> None:
    parts = run_processes(2, both, tmp_path)
    for method in ("gpipe", "1f1b"):
        for rank, part in enumerate(parts):
            (state, loss), (expected, expected_loss) = part[method]
            assert sorted(state) == sorted(expected)
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11, msg=f"{method}: {key}")
            if rank == 1:
                assert loss == pytest.approx(expected_loss, rel=1e-9)
