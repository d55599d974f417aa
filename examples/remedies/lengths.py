"""Sequences of several lengths, the same number of tokens in each microbatch, as in Pouransari et al. 2024 (dataset decomposition).

B rows of T tokens become B·T/L rows of L tokens. Every process draws the same length L from seed and microbatch, so lengths don't
travel. Messages, stored activations and losses keep their size. Evaluation and the prediction of memory use the longest length, T.
"""

from __future__ import annotations

from dataclasses import dataclass

from petra import Extension
from petra.engine.block import WrappedRunner
from petra.errors import require
from petra.reversible import derive_seed


@dataclass(frozen=True)
class Lengths(Extension):
    """Cuts rows of tokens into sequences of one of ``lengths``. The longest is ``data.size``, and the others divide it."""

    lengths: tuple[int, ...] = (128, 256)
    seed: int = 0

    def check(self, method, rules, rate):
        fits = bool(self.lengths) and all(n > 1 and max(self.lengths) % n == 0 for n in self.lengths)
        require(fits, "remedy.lengths", "integers > 1 that divide the largest of them", self.lengths)

    def wrap_runner(self, runner):
        return _Cut(runner, self)


class _Cut(WrappedRunner):
    """Gives a block short sequences. What is around it has whole rows."""

    def __init__(self, inner, settings):
        super().__init__(inner)
        self._settings, self._longest, self._tokens, fetch = settings, max(settings.lengths), 0, getattr(inner, "fetch", None)
        if fetch is not None:
            inner.fetch = lambda m: self._cut(m, fetch(m))

    def forward(self, m, x):
        rows, size = x[0].shape[:2]
        require(size == self._longest, "remedy.lengths", f"{size}, the tokens of a row, as the longest", self._longest)
        self._tokens = rows * size
        return self._cut(m, self.inner.forward(m, self._cut(m, x)), back=True)

    def backward(self, m, y, dy):
        x, dx, gradients = self.inner.backward(m, self._cut(m, y), self._cut(m, dy))
        return self._cut(m, x, back=True), self._cut(m, dx, back=True), gradients

    def _cut(self, m, streams, back=False):
        """Reshape tensors (rows, tokens, …), but not logits (tokens, classes), to the microbatch's length, or back."""
        length = self._settings.lengths[derive_seed(self._settings.seed, m) % len(self._settings.lengths)]
        old, new = (length, self._longest) if back else (self._longest, length)
        return tuple(t.reshape(-1, new, *t.shape[2:]) if t.shape[:2] == (self._tokens // old, old) else t for t in streams)
