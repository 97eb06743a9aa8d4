"""An optimizer's update, applied in pieces (see `pieces`); what is not finite changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from upweight.models.layers import Params
from upweight.training.optimizer import Optimizer
from upweight.training.pieces import global_norm, one_by_one, pieces_of

Applied = tuple[tuple[Params, ...], tuple[Any, ...], tuple[jax.Array, ...], bool]


def make_apply(*optimizers: Optimizer) -> Callable[..., Applied]:
    """(trees, optimizer states, gradients, loss) → (trees, states, gradient norms, applied); one of each an optimizer.

    A loss or norm that is not finite leaves all trees and states as they were. States are donated; parameters never are, since an
    engine may be reading them.
    """
    updates = [_make_update(optimizer) for optimizer in optimizers]

    def apply(
        trees: tuple[Params, ...], states: tuple[Any, ...], grads: tuple[Params, ...], loss: jax.Array
    ) -> Applied:
        norms = tuple(global_norm(part) for part in grads)
        if not all(math.isfinite(float(number)) for number in (loss, *norms)):
            return trees, states, norms, False
        parts = zip(updates, trees, states, grads, norms, strict=True)
        done = [update(*part) for update, *part in parts]
        return tuple(tree for tree, _ in done), tuple(state for _, state in done), norms, True

    return apply


def _make_update(optimizer: Optimizer) -> Callable[[Params, Any, Params, jax.Array], tuple[Params, Any]]:
    def piece(
        params: list[Any], moments: list[list[Any]], shared: list[Any], grads: list[Any], norm: Any, form: _Form
    ) -> tuple[list[Any], list[list[Any]], list[Any]]:
        change, state = optimizer.rule.update(optimizer.clipped(grads, norm), form.join(moments, shared), params)
        return optax.apply_updates(params, change), *form.split(state, jax.tree.structure(params))

    compiled = one_by_one(jax.jit(piece, donate_argnums=1, static_argnums=5))

    def update(tree: Params, state: Any, grads: Params, norm: jax.Array) -> tuple[Params, Any]:
        clip_state, rule_state = state
        structure: Any = jax.tree.structure(tree)
        form = _Form(rule_state, structure)
        moments, shared = form.split(rule_state, structure)
        arrays, gradients = jax.tree.leaves(tree), structure.flatten_up_to(grads)
        moments = [structure.flatten_up_to(each) for each in moments]
        after = shared
        for numbers in pieces_of(tree):
            mine = [[each[i] for i in numbers] for each in moments]
            some, changed, after = compiled(
                [arrays[i] for i in numbers], mine, shared, [gradients[i] for i in numbers], norm, form
            )
            for place, number in enumerate(numbers):
                arrays[number] = some[place]
                for each, new in zip(moments, changed, strict=True):
                    each[number] = new[place]
        moments = [structure.unflatten(each) for each in moments]
        return structure.unflatten(arrays), (clip_state, form.join(moments, after))

    return update


class _Form:
    """Which parts of an optimizer's state are trees like the parameters (its moments), and which stand beside them (its counts)."""

    def __init__(self, state: Any, params: Any) -> None:
        """`params` is the structure of the parameters."""
        nodes, self._structure = jax.tree.flatten(state, is_leaf=lambda node: jax.tree.structure(node) == params)
        self._alike = tuple(jax.tree.structure(node) == params for node in nodes)

    def split(self, state: Any, params: Any) -> tuple[list[Any], list[Any]]:
        """(moments, shared)."""
        nodes = jax.tree.leaves(state, is_leaf=lambda node: jax.tree.structure(node) == params)
        both = list(zip(nodes, self._alike, strict=True))
        return [node for node, alike in both if alike], [node for node, alike in both if not alike]

    def join(self, moments: list[Any], shared: list[Any]) -> Any:
        parts = {True: iter(moments), False: iter(shared)}
        return jax.tree.unflatten(self._structure, [next(parts[alike]) for alike in self._alike])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and (self._structure, self._alike) == (other._structure, other._alike)

    def __hash__(self) -> int:
        return hash((self._structure, self._alike))
