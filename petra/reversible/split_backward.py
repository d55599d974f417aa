"""Backward passes in two parts: the gradients of the inputs first, those of the weights later.

A stage of a pipeline sends the gradient of its input to the previous stage before it computes those of its weights (Qi et al. 2024,
Zero Bubble Pipeline Parallelism). Together, the parts run the same kernels as one backward pass, and give the same gradients bit
for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from petra.torch_private import vector_jacobian_products

PRODUCTS = frozenset(f"{name}Backward0" for name in ("Convolution", "Linear", "Addmm", "Mm", "Bmm", "Baddbmm"))
"""Operations whose gradients of input and weight are two separate products. Others share work between their gradients, which would
be done twice, and are cheap."""
NO_WEIGHTS: frozenset[int] = frozenset()
Found = list[Tensor | None]
"""Gradients; None for tensors on which no output depends."""


@dataclass(frozen=True)
class _Product:
    """A product of which only the gradients of weights are missing.

    Attributes:
        node: Node of the autograd graph.
        weights: Indices of the weights that no other node of the graph reads.
    """

    node: Node
    weights: tuple[int, ...]


class Differentiate(Protocol):
    """A function that differentiates outputs with respect to inputs, now, and with respect to weights, now or later."""

    def __call__(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Found, Callable[[], Found]]:
        """Return the gradients of the inputs, and a function that returns those of the weights. It may be called once.

        Args:
            gradients: Gradients with respect to the outputs.
        """


def differentiate(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Found, Callable[[], Found]]:
    """Compute all gradients at once; see :class:`Differentiate`."""
    found: Found = list(vector_jacobian_products(outputs, [*inputs, *weights], gradients))
    of_weights = found[len(inputs) :]
    return found[: len(inputs)], lambda: of_weights


def differentiate_inputs(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Found, Callable[[], Found]]:
    """Compute the gradients of the inputs; see :class:`Differentiate`. The returned function computes those of the weights.

    Products with a weight are differentiated in two parts. Gradients of other weights, such as those of normalisations, are
    computed with the gradients of the inputs. Until the function has been called, the graph stays in memory.
    """
    products = _products(outputs, inputs, weights)
    later = {i for product in products for i in product.weights}
    now = [i for i in range(len(weights)) if i not in later]
    edges = [GradientEdge(product.node, 0) for product in products]
    wanted: list[Any] = [*inputs, *(weights[i] for i in now), *edges]
    found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, retain_graph=bool(products))
    result: Found = [None] * len(weights)
    for i, gradient in zip(now, found[len(inputs) :], strict=False):
        result[i] = gradient
    arrived = found[len(inputs) + len(now) :]

    def compute() -> Found:
        for product, edge, gradient in zip(products, edges, arrived, strict=True):
            if gradient is None:
                continue
            own = [weights[i] for i in product.weights]
            for i, g in zip(product.weights, torch.autograd.grad((edge,), own, (gradient,), allow_unused=True), strict=True):
                result[i] = g
        return result

    return list(found[: len(inputs)]), compute


def _products(outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[_Product]:
    """Return the products between inputs and outputs whose weights no other node reads, those nearest to the inputs first."""
    # Weights that a node depends on; None if it depends on an input.
    reads: dict[Node | None, frozenset[int] | None] = {None: NO_WEIGHTS}
    reads.update((get_gradient_edge(w).node, frozenset((i,))) for i, w in enumerate(weights) if w.requires_grad)
    reads.update((get_gradient_edge(x).node, None) for x in inputs)
    readers: dict[int, list[Node]] = {}
    between = []
    for node, children in _children_first([y.grad_fn for y in outputs], reads):
        sets = [reads[child] for child in children]
        if None in sets:
            reads[node] = None
            between.append(node)
            for i in NO_WEIGHTS.union(*[found for found in sets if found]):
                readers.setdefault(i, []).append(node)
        else:
            reads[node] = NO_WEIGHTS.union(*sets)  # type: ignore[arg-type]
    for y in outputs:  # one that depends on no input reads its weights, too
        root = get_gradient_edge(y).node
        for i in reads.get(root) or ():
            readers.setdefault(i, []).append(root)
    own: dict[Node, list[int]] = {}
    for i, nodes in readers.items():
        if len(nodes) == 1 and nodes[0].name() in PRODUCTS:
            own.setdefault(nodes[0], []).append(i)
    return [_Product(node, tuple(own[node])) for node in between if node in own]


def _children_first(roots: Sequence[Node | None], known: Container[Node | None]) -> Iterator[tuple[Node, list[Node | None]]]:
    """Yield each node of a graph with its children, after them. Nodes in ``known`` are left out."""
    seen = set[Node]()
    stack: list[tuple[Node | None, list[Node | None] | None]] = [(root, None) for root in roots]
    while stack:
        node, children = stack.pop()
        if children is not None:
            yield node, children  # type: ignore[misc]
        elif node not in known and node not in seen:
            seen.add(node)  # type: ignore[arg-type]
            children = [child for child, _ in node.next_functions]  # type: ignore[union-attr]
            stack.append((node, children))
            stack += [(child, None) for child in children]
