"""What happens to a stage's weights every k microbatches: learning rate, unscaling, clipping, optimizer step, moving average.

Nothing here waits for the device except :meth:`Update.check`, and the optimizers that can't skip a step by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn

from petra.engine.stage import Stage
from petra.errors import ConfigError, NumericsError
from petra.hooks import Hooks
from petra.method import Method
from petra.specs import Streams

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""From a stage's blocks to the optimizer of their parameters."""

LARGEST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000
"""Of a dynamic loss scale: where it starts, and the good updates after which it doubles (Micikevicius et al. 2018, section 3.2)."""
CHECK_EVERY = 50
"""Updates between two looks at a GPU's flag for numbers that aren't finite; on a CPU each update looks."""


@dataclass(frozen=True)
class UpdateRules:
    """What is done to a gradient and to the weights beside the optimizer's step.

    Attributes:
        clip: largest 2-norm of an update's gradient; None doesn't clip.
        clip_globally: the norm is the whole network's instead of the stage's; all stages must update at the same moment.
        average: decay of a moving average of the weights, which evaluation uses; None for none.
        loss_scale: gradients inside a stage are multiplied by this and divided again before their use, so that those of fp16 don't
            vanish. Streams between stages stay in float32, so each stage has a scale of its own and needs to tell nobody;
            ``dynamic`` halves it on overflow and doubles it after :data:`GROWTH_INTERVAL` good updates; None for none.
        nonfinite: a gradient that isn't finite stops the run, or skips this update of the stage. A dynamic scale that can still be
            halved skips in any case.

    Raises:
        ConfigError: a value out of range.
    """

    clip: float | None = None
    clip_globally: bool = False
    average: float | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"optim.clip: found {self.clip}, accepted are null or numbers > 0")
        if self.clip_globally and self.clip is None:
            raise ConfigError("optim.clip_scope: found global without a norm, accepted is stage where optim.clip=null")
        if self.average is not None and not 0 < self.average < 1:
            raise ConfigError(f"optim.ema: found {self.average}, accepted are null or numbers between 0 and 1")
        if self.loss_scale not in (None, "dynamic") and not (isinstance(self.loss_scale, int | float) and self.loss_scale > 0):
            raise ConfigError(f"trainer.loss_scale: found {self.loss_scale}, accepted are null, dynamic, or numbers > 0")
        if self.nonfinite not in ("stop", "skip"):
            raise ConfigError(f"trainer.nonfinite: found {self.nonfinite}, accepted are stop, skip")

    def require_moment(self, method: Method, delays: Sequence[int]) -> None:
        """Refuses global clipping for a method whose stages update at different times, with their ``delays`` τ.

        Raises:
            ConfigError: it is one.
        """
        if self.clip_globally and not method.flush and any(delays):
            raise ConfigError(
                f"optim.clip_scope: found global with method.delay={method.delay} and no flush, accepted is stage; stages update "
                "at different times there, so the network never has one gradient as a whole"
            )


class Update:
    """The updates of one stage.

    Args:
        optimizer: of the stage's parameters; none if it has none.
        learning_rate: from the microbatches that the stage has done, those of the update included, to its learning rate; None
            leaves the optimizer's own.
        device: of the stage's tensors.
        number: of the stage, from 1, for messages.
        last: whether the stage's gradient comes from the loss.
        hooks: Hooks that observe updates and all-reduces.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: torch.optim.Optimizer | None,
        learning_rate: Callable[[int], float] | None = None,
        rules: UpdateRules = UpdateRules(),
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        number: int = 1,
        last: bool = True,
        hooks: Hooks | None = None,
    ) -> None:
        self.hooks = Hooks() if hooks is None else hooks
        self.stage, self.optimizer, self.learning_rate, self.rules = stage, optimizer, learning_rate, rules
        self.device, self.number, self.last = device, number, last
        self._blocks = [{n: p for n, p in block.named_parameters() if p.requires_grad} for block in stage.module]
        self._parameters = [p for block in self._blocks for p in block.values()]
        self.all_reduce: Callable[..., tuple[Tensor, ...]] | None = None
        """With replicas: (microbatch, *values) → sums of the values over replicas. Waits until all gradients are sums too."""
        self.restart_averages()
        scale = LARGEST_SCALE if rules.loss_scale == "dynamic" else rules.loss_scale
        self.scale = None if scale is None else self._tensor(scale)
        self.done = 0
        """Updates, skipped ones included."""
        self._good = self._tensor(0)
        self._skipped = self._tensor(0)
        self._failed = self._tensor(0)
        self._received: list[Tensor] = []  # sums of all δ since the last update; not finite if one of them wasn't
        self._sent = self._tensor(0)  # the same of what the stage sends on, under a loss scale
        self._own = self._tensor(0)
        self._norms, self._measured = self._tensor(0), self._tensor(0)
        self._t = 0
        skips = rules.nonfinite == "skip" or rules.loss_scale is not None
        self._good_statistics = [(s, s.clone()) for s in _statistics(stage)] if skips else []

    # -- every microbatch ------------------------------------------------------------------------------------------------------

    def scaled(self, delta: Streams) -> Streams:
        """δ as the stage's backward takes it."""
        if self.scale is None:  # then one number of each sample tells enough
            self._received += [d.as_strided(d.shape[:1], d.stride()[:1]).sum() for d in delta]
            return delta
        self._received += [d.sum() for d in delta]
        return tuple(d * self.scale.to(d.dtype) for d in delta)

    def unscaled(self, delta: Streams) -> Streams:
        """δ as it leaves the stage."""
        if self.scale is None:
            return delta
        for d in delta:
            self._sent += d.sum()
        return tuple(d / self.scale.to(d.dtype) for d in delta)

    # -- every k microbatches --------------------------------------------------------------------------------------------------

    def __call__(self, t: int) -> None:
        """The update after microbatch ``t``, counted from 1; one that is clipped globally waits for :meth:`apply`."""
        self._t = t
        if self.all_reduce is not None:
            for call in self.hooks.all_reduce_begin:
                call(self.number - 1, t - 1)
            received, self._sent = self.all_reduce(t - 1, self._all_received(), self._sent)
            self._received = [received]
            for call in self.hooks.all_reduce_end:
                call(self.number - 1, t - 1)
        if not self.rules.clip_globally:
            self.apply(self.squared_norm())

    def squared_norm(self) -> Tensor:
        """Of the stage's gradient as it stands, in float64."""
        if self._parameters:
            norms = torch._foreach_norm([p.grad for p in self._parameters])  # type: ignore[misc]
            self._own = torch.stack(norms).double().square().sum()
            if self.scale is not None:
                self._own /= self.scale.square()
        return self._own

    def apply(self, squares: Tensor) -> None:
        """The update.

        Args:
            squares: squared norm of the gradient to clip by and to judge by: the stage's, or the network's.
        """
        norm = squares.sqrt()
        received = self._all_received()
        # Where looking costs no waiting, the usual case has nothing to judge.
        fine = self.device.type == "cpu" and self.scale is None and isfinite(norm.item() + received.item())
        bad = None if fine else self._judge(norm, received.isfinite())
        factor = self._factor(norm)
        if self._parameters:
            if factor is not None:
                torch._foreach_mul_([p.grad for p in self._parameters], factor.to(self._parameters[0].dtype))  # type: ignore[misc]
            for call in self.hooks.update_begin:
                call(self.number - 1, self._t - 1)
            with self.stage.updating():
                self._step(bad)
            for call in self.hooks.update_end:
                call(self.number - 1, self._t - 1)
        if self.averages:
            assert self.rules.average is not None
            # Young averages follow the weights more closely, or the initial weights would weigh on short runs.
            decay = min(self.rules.average, (1 + self.done) / (10 + self.done))
            torch._foreach_lerp_(self.averages, [p.detach() for p in self._parameters], 1 - decay)
        self.done += 1
        self._measured += 1 if bad is None else ~bad
        self._norms += self._own.sqrt() if bad is None else torch.where(bad, torch.zeros_like(norm), self._own.sqrt())
        self._received.clear()
        self._sent.zero_()
        for statistic, good in self._good_statistics:
            statistic.copy_(torch.where(statistic.isfinite().all(), statistic, good))
            good.copy_(statistic)
        if self.device.type == "cpu" or self.done % CHECK_EVERY == 0:
            self.check()

    def _factor(self, norm: Tensor) -> Tensor | None:
        """What the gradients are multiplied by: out of the loss scale, into the sphere."""
        clip = None if self.rules.clip is None else (self.rules.clip / (norm + 1e-6)).clamp(max=1.0)
        if self.scale is None:
            return clip
        return 1 / self._used_scale if clip is None else clip / self._used_scale

    def _judge(self, norm: Tensor, received: Tensor) -> Tensor:
        """Whether the update must be skipped; counts, and adapts the loss scale."""
        bad, own = ~norm.isfinite(), ~self._own.isfinite()
        if self.scale is not None:  # what is sent may overflow where the parameters' gradients don't, and no other stage may halve
            lost = ~self._sent.isfinite()
            bad, own = bad | lost, own | lost
        if self.last:
            bad, own = bad | ~received, own | ~received
        failed = own
        if self.scale is not None:
            self._used_scale = self.scale
        if self.scale is not None and self.rules.loss_scale == "dynamic":
            # What came in not finite is not this stage's overflow, and at its origin it may have been one.
            overflow = own & received
            failed = (overflow & (self.scale <= 1)) | (~received if self.last else torch.zeros_like(own))
            self._good = torch.where(bad, torch.zeros_like(self._good), self._good + 1)
            grown = torch.where((self._good % GROWTH_INTERVAL == 0) & ~bad, 2 * self.scale, self.scale)
            self.scale = torch.where(overflow, (self.scale / 2).clamp(min=1.0), grown)
        self._skipped += bad
        # 2t where the numbers went wrong in this stage, 2t + 1 where they came in wrong: the first time only.
        code = 2 * self._t + (0 if self.last else ~received)
        self._failed = torch.where(failed & (self._failed == 0), code, self._failed)
        return bad

    def _step(self, bad: Tensor | None) -> None:
        assert self.optimizer is not None
        self._set_rate()
        if bad is None:
            self.optimizer.step()
            return
        if self.device.type == "cuda" and getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self.optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        elif bad.item():
            return
        self.optimizer.step()

    def _set_rate(self) -> None:
        """Gives the optimizer the learning rate of the last update."""
        assert self.optimizer is not None
        if self.learning_rate is not None:
            rate = self.learning_rate(self._t)
            for group in self.optimizer.param_groups:
                group["lr"] = rate

    def check(self) -> None:
        """Waits for the device.

        Raises:
            NumericsError: a gradient wasn't finite and the rules say stop.
        """
        code = int(self._failed.item()) if self.rules.nonfinite == "stop" else 0
        if not code:
            return
        t, came_in = divmod(code, 2)
        what = "loss or gradient" if self.last else "gradient"
        source = f", first seen in what stage {self.number + 1} sent" if came_in else ""
        raise NumericsError(
            f"stage {self.number}: found a {what} that isn't finite in the update after microbatch {t}{source}; the update was not "
            "made. Lower optim.lr or set optim.clip; trainer.nonfinite=skip goes on without such updates",
            origin=not came_in,
        )

    def check_drained(self) -> None:
        """What :meth:`check` can't see: an update that has only begun, and running statistics. Waits for the device.

        A checkpoint of them would be of no use. Where updates may be skipped, both are mended when this one is.

        Raises:
            NumericsError: a number isn't finite, and the rules say stop.
        """
        self.check()
        if self.rules.nonfinite == "skip" or self.scale is not None:
            return
        received = self._all_received()
        if not (self.squared_norm() + received.abs()).isfinite():
            raise NumericsError(
                f"stage {self.number}: found a gradient that isn't finite in the update that began after microbatch {self._t}; "
                "the update was not made. Lower optim.lr or set optim.clip",
                origin=bool(received.isfinite()),
            )
        statistics = _statistics(self.stage)
        if statistics and not torch.stack([s.double().sum() for s in statistics]).isfinite().all():
            raise NumericsError(
                f"stage {self.number}: found running statistics that aren't finite after microbatch {self._t}; an evaluation would "
                "be wrong. Lower optim.lr, or look at the data",
                origin=True,
            )

    # -- averages, records, state ----------------------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the stage's parameters are their moving averages, if there are any; the pipeline must be drained."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def restart_averages(self) -> None:
        """Lets the moving averages, if the rules ask for some, begin with the weights as they are."""
        self.averages = [p.detach().clone() for p in self._parameters] if self.rules.average is not None else []

    def _swap(self) -> None:
        for i, average in enumerate(self.averages):
            parameter = self._parameters[i]
            self.averages[i], parameter.data = parameter.data, average

    def metrics(self) -> dict[str, float]:
        """Since the last call: mean norm of an update's gradient before clipping; and the updates skipped since the start, which
        don't enter the mean."""
        found = {"gradient_norm": self._norms.item() / max(self._measured.item(), 1), "skipped_updates": self._skipped.item()}
        if self.scale is not None:
            found["loss_scale"] = self.scale.item()
        self._norms, self._measured = self._tensor(0), self._tensor(0)
        return found

    def state_dict(self) -> dict[str, Any]:
        """``stage``: numbers of the stage. ``blocks``: for each block, by the names of its parameters, the optimizer's state, the
        moving ``average`` and the ``gradient`` accumulated so far, unscaled."""
        numbers = {
            "good": self._good,
            "skipped": self._skipped,
            "scale": self.scale,
            "done": self.done,
            "t": self._t,
            "norms": self._norms,
            "measured": self._measured,
        }
        averages = iter(self.averages)
        return {
            "stage": {key: value.item() if isinstance(value, Tensor) else value for key, value in numbers.items()},
            "blocks": [
                {
                    "optimizer": {n: dict(self.optimizer.state[p]) for n, p in block.items()} if self.optimizer else {},
                    "average": {n: next(averages) for n in block} if self.averages else {},
                    "gradient": {
                        n: p.grad if self.scale is None else (p.grad / self.scale).to(p.dtype)
                        for n, p in block.items()
                        if p.grad is not None
                    },
                }
                for block in self._blocks
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` of the same blocks told; weights are not part of it."""
        numbers, names = state["stage"], [n for block in self._blocks for n in block]
        self._good, self._skipped, self._norms = (self._tensor(numbers[key]) for key in ("good", "skipped", "norms"))
        self.done, self._t, self._measured = int(numbers["done"]), int(numbers["t"]), self._tensor(numbers["measured"])
        if self.scale is not None and numbers["scale"] is not None:
            self.scale = self._tensor(numbers["scale"])
        owners = [saved for block, saved in zip(self._blocks, state["blocks"], strict=True) for _ in block]
        if self.optimizer is not None:
            packed = self.optimizer.state_dict()
            saved = {p: o["optimizer"][n] for p, o, n in zip(self._parameters, owners, names, strict=True)}
            order = [p for group in self.optimizer.param_groups for p in group["params"]]
            packed["state"] = {i: saved[p] for i, p in enumerate(order) if saved[p]}
            self.optimizer.load_state_dict(packed)
            if self._t:
                self._set_rate()  # predictions of the weights to come read it between updates
        for average, owner, name in zip(self.averages, owners, names, strict=bool(self.averages)):
            average.copy_(owner["average"][name])
        for parameter, owner, name in zip(self._parameters, owners, names, strict=True):
            assert parameter.grad is not None
            gradient = owner["gradient"][name].to(parameter.grad)
            parameter.grad.copy_(gradient if self.scale is None else gradient * self.scale)
        self._received.clear()
        self._sent.zero_()
        for statistic, good in self._good_statistics:
            good.copy_(statistic)

    def _all_received(self) -> Tensor:
        return torch.stack(self._received).double().sum() if self._received else self._tensor(0)

    def _tensor(self, value: float) -> Tensor:
        return torch.tensor(float(value), dtype=torch.float64, device=self.device)


def _statistics(stage: Stage) -> list[Tensor]:
    """Running means and variances: what a microbatch whose numbers aren't finite would spoil for good."""
    return [buffer for buffer in stage.module.buffers() if buffer.is_floating_point()]
