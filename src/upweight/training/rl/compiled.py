"""The compiled parts of a trainer's step: prepare, gradient, update, evaluation.

Models go in as arrays and come out as arrays. Gradients are donated, and on accelerators the optimizer's state; parameters
never are, since an engine, a reference or a user may hold them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from upweight.training.rl.binding import module_of
from upweight.training.rl.devices import Shardings, constrained
from upweight.training.rl.inputs import UNWHITENED, Inputs, Totals, whitened
from upweight.training.rl.scoring import Places
from upweight.training.rl.update import clipped_update

Metrics = dict[str, jax.Array]
# (model, reference, batch) → (inputs, metrics of the whole batch)
Prepare = Callable[[Any, Any, Any], tuple[Inputs, Metrics]]
# (model, reference, inputs, places, totals) → (loss, metrics that add up over the parts of a batch)
Loss = Callable[[Any, Any, Inputs, Places, Totals], tuple[jax.Array, Metrics]]


class Form:
    """What a module is apart from its arrays, as a static argument. Unlike a graph definition it has a hash even when the
    module holds a dict or a list of plain values."""

    def __init__(self, graphdef: Any) -> None:
        self.graphdef = graphdef

    def __hash__(self) -> int:
        return 0  # few forms meet in one cache; they are told apart by comparison

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and bool(self.graphdef == other.graphdef)

    def merge(self, *states: Any) -> Any:
        return nnx.merge(self.graphdef, *states)


class Frozen(NamedTuple):
    """A module that is only read: what it is and its arrays. None when there is none."""

    form: Form | None
    state: Any

    @classmethod
    def of(cls, module: nnx.Module | None) -> Frozen:
        return cls(None, None) if module is None else cls(*taken_apart(module))

    def module(self) -> Any:
        return None if self.form is None else self.form.merge(self.state)


def taken_apart(module: Any) -> tuple[Form, Any]:
    graphdef, state = nnx.split(module)
    return Form(graphdef), state


class Lies(NamedTuple):
    """Where the arrays of model and optimizer lie on a mesh; None for those that nobody placed."""

    model: Shardings | None = None
    optimizer: Shardings | None = None


class CompiledStep:
    """`prepare` and `loss` of a trainer, compiled once per shape."""

    def __init__(
        self, prepare: Prepare, loss: Loss, wrt: Any, max_grad_norm: float | None, lies: Lies | None = None
    ) -> None:
        self._prepare, self._loss = prepare, loss
        self._wrt, self._max_grad_norm = wrt, max_grad_norm
        self._lies = Lies() if lies is None else lies
        self._prepared = jax.jit(self._run_prepare, static_argnums=(0, 1))
        self._gradient = jax.jit(self._run_gradient, static_argnums=(0, 1))
        self._value = jax.jit(self._run_value, static_argnums=(0, 1))
        donated = (5,) if jax.default_backend() == "cpu" else (4, 5)
        self._update = jax.jit(self._run_update, static_argnums=(0, 1), donate_argnums=donated)
        self._add = jax.jit(add_trees, donate_argnums=0)
        self._whitened = jax.jit(whitened)

    def prepare(self, model: Any, reference: Frozen, batch: Any) -> tuple[Inputs, Metrics]:
        form, state = taken_apart(model)
        return self._prepared(form, reference.form, state, reference.state, batch)

    def whitened(self, several: list[Inputs]) -> list[Inputs]:
        return self._whitened(several) if any(UNWHITENED in inputs.arrays for inputs in several) else several

    def value(
        self, model: Any, reference: Frozen, pieces: list[tuple[Inputs, Places]], totals: Totals
    ) -> tuple[jax.Array, Metrics]:
        form, state = taken_apart(model)
        found = [self._value(form, reference.form, state, reference.state, *piece, totals) for piece in pieces]
        return join(found)

    def step(
        self,
        model: Any,
        optimizer: Any,
        reference: Frozen,
        pieces: list[tuple[Inputs, Places]],
        totals: Totals,
        target_kl: float | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """One update from the gradients of all pieces, in place; none when nothing is trained. `totals` are on the host."""
        form, (params, rest) = split(model, self._wrt)
        started, total, found = rest, None, []
        for inputs, places in pieces:
            grads, loss, metrics, changed = self._gradient(
                form, reference.form, params, rest, reference.state, inputs, places, totals
            )
            rest = _replaced(rest, changed)
            total = grads if total is None else self._add(total, grads)
            found.append((loss, metrics))
        loss, metrics = join(found)
        opt_form, opt_state = taken_apart(optimizer)
        allowed: Any = (
            totals.tokens > 0
        )  # with no token the gradient is 0, but decay or momentum would move the weights
        if allowed and target_kl is not None:
            allowed = metrics["approx_kl"] <= target_kl
        changed, kept = _changes(started, rest)
        params, opt_state, changed, report = self._update(
            form, opt_form, params, (started, kept, changed), opt_state, total, loss, allowed
        )
        nnx.update(model, params, _replaced(started, changed))
        nnx.update(optimizer, opt_state)
        return loss, metrics | report

    def _run_prepare(self, form: Form, other: Form | None, state: Any, other_state: Any, batch: Any) -> Any:
        return self._prepare(form.merge(state), Frozen(other, other_state).module(), batch)

    def _run_value(
        self,
        form: Form,
        other: Form | None,
        state: Any,
        other_state: Any,
        inputs: Inputs,
        places: Places,
        totals: Totals,
    ) -> tuple[jax.Array, Metrics]:
        model = form.merge(state)
        return self._loss(model, Frozen(other, other_state).module(), inputs, places, totals)

    def _run_gradient(
        self,
        form: Form,
        other: Form | None,
        params: Any,
        rest: Any,
        other_state: Any,
        inputs: Inputs,
        places: Places,
        totals: Totals,
    ) -> tuple[Any, jax.Array, Metrics, dict[int, Any]]:
        def of(params: Any) -> tuple[jax.Array, tuple[Metrics, dict[int, Any]]]:
            # A copy of the tree, whose variables belong to this trace: a forward pass may change them.
            model = form.merge(params, jax.tree.map(lambda x: x, rest))
            reference = Frozen(other, other_state).module()
            loss, metrics = self._loss(model, reference, inputs, places, totals)
            after = split(model, self._wrt)[1][1]
            return loss, (metrics, _changes(rest, after)[0])

        (loss, (metrics, changed)), grads = jax.value_and_grad(of, has_aux=True)(params)
        return constrained(grads, self._lies.model), loss, metrics, changed

    def _run_update(
        self,
        form: Form,
        opt_form: Form,
        params: Any,
        others: tuple[Any, dict[int, Any], dict[int, Any]],
        opt_state: Any,
        grads: Any,
        loss: jax.Array,
        allowed: Any,
    ) -> tuple[Any, Any, dict[int, Any], Metrics]:
        rest, before, changed = others
        model, optimizer = form.merge(params, rest), opt_form.merge(opt_state)
        report = clipped_update(model, optimizer, grads, max_grad_norm=self._max_grad_norm, loss=loss, allowed=allowed)
        applied = report["update_skipped"] < 1
        changed = {i: jnp.where(applied, new, before[i]) for i, new in changed.items()}
        params = constrained(nnx.state(model, self._wrt), self._lies.model)
        return params, constrained(nnx.state(optimizer), self._lies.optimizer), changed, report


def call(adapter: Any, method: str, batch: Any) -> Any:
    """`adapter.method(batch)`, compiled once per shape where the adapter's model is a module that it can be bound to anew."""
    module = module_of(adapter)
    if module is None:
        return getattr(adapter, method)(batch)
    form, state = taken_apart(module)
    return _call(form, adapter, method, state, batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(form: Form, adapter: Any, method: str, state: Any, batch: Any) -> Any:
    return getattr(adapter.bind(form.merge(state)), method)(batch)


def split(model: Any, wrt: Any) -> tuple[Form, tuple[Any, Any]]:
    """What the model is, the arrays that are trained, and its other arrays."""
    graphdef, *states = nnx.split(model, wrt, ...)
    return Form(graphdef), (states[0], states[1])


def add_trees(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


@jax.jit
def _join(found: list[tuple[jax.Array, Metrics]]) -> tuple[jax.Array, Metrics]:
    metrics = {}
    for name in (name for name in found[0][1] if all(name in each for _, each in found)):
        values = jnp.stack([each[name] for _, each in found])
        metrics[name] = jnp.max(values) if name.endswith("_max") else jnp.sum(values)
    return sum(loss for loss, _ in found), metrics  # type: ignore[return-value]


def join(found: list[tuple[jax.Array, Metrics]]) -> tuple[jax.Array, Metrics]:
    """Loss and metrics of a batch from those of its parts: sums, and of maxima the greatest. One that a part lacks is
    none of the batch."""
    return found[0] if len(found) == 1 else _join(found)


def _changes(before: Any, after: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Which leaves are no longer the same object (counters of random streams, running statistics): (new, old) by number."""
    pairs = enumerate(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    differing = {i: pair for i, pair in pairs if pair[0] is not pair[1]}
    return {i: new for i, (_, new) in differing.items()}, {i: old for i, (old, _) in differing.items()}


def _replaced(tree: Any, changed: dict[int, Any]) -> Any:
    if not changed:
        return tree
    leaves, form = jax.tree.flatten(tree)
    return jax.tree.unflatten(form, [changed.get(i, leaf) for i, leaf in enumerate(leaves)])
