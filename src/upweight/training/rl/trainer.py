"""What the typed-batch trainers share: checks, the compiled step, micro-batches, evaluation, state.

A trainer of this kind says what a batch must bring (`_checked`), what follows from the batch alone (`_prepare`) and the loss of
some of its rows (`_loss`). It owns no loop.

Invariants
* Any split into micro-batches gives the gradient of the whole batch: every sum is divided by a count over all of it.
* A loss or gradient that is not finite, or a batch without a trained token, changes neither model nor optimizer.
* A repeated shape compiles nothing. Where a program also depends on how much of a batch is trained or shared, that size never
  shrinks (`sizes`), so one shape has few programs.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from upweight.errors import BatchError, ConfigError
from upweight.training.rl.binding import module_of, rebind
from upweight.training.rl.checks import check_positive
from upweight.training.rl.compiled import CompiledStep, Frozen, Lies, Metrics
from upweight.training.rl.devices import Placement, on_host, put_module
from upweight.training.rl.inputs import Inputs, Totals, cut, split_evenly, whitened
from upweight.training.rl.padding import Shapes
from upweight.training.rl.scoring import Places, all_places, can_share, needs_all_places
from upweight.training.rl.sizes import Sizes
from upweight.training.rl.state import restore, snapshot
from upweight.training.rl.update import clipped_update

Config = TypeVar("Config")
Result = tuple[jax.Array, Metrics]

OF_TOKENS = (  # means over trained tokens, beside the terms of the loss
    "approx_kl",
    "ratio_mean",
    "ratio_max",
    "clip_fraction_low",
    "clip_fraction_high",
    "is_weight_mean",
    "value_clip_fraction",
    "response_length_mean",
)


class SequenceTrainer(ABC, Generic[Config]):
    """Base of the trainers; `create_loss_fn`, `compute_loss`, `train_step`, `eval_step` and state are here."""

    def __init__(
        self, model: nnx.Module, optimizer: Any, config: Config, adapters: dict[str, Any], reference: Any
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config: Config = config
        replace(config)  # type: ignore[type-var]  # checks the fields again: a config may have been changed since it was made
        self._reference = reference
        self._adapters = adapters
        for adapter in adapters.values():
            rebind(adapter, model, model)
        self.share_prompts = True  # compute once what rows have in common, where the model allows it
        self._shapes, self._sizes = Shapes(), Sizes()
        self._warned: set[str] = set()
        self._placement: Placement | None = None
        self._step = self._compiled(Lies())
        self._loss_fn = self._make_loss_fn()

    # What a trainer of one algorithm says.

    @abstractmethod
    def _checked(self, batch: Any) -> Any:
        """The batch in its canonical type; an error for what is missing or of the wrong kind. Looks at no values of tracers."""

    @abstractmethod
    def _padded(self, batch: Any) -> Any:
        """A checked batch in one of few shapes, made on the host."""

    @abstractmethod
    def _prepare(self, model: Any, reference: Any, batch: Any) -> tuple[Inputs, Metrics]:
        """What follows from the batch alone, and the metrics of it."""

    @abstractmethod
    def _loss(self, model: Any, reference: Any, inputs: Inputs, places: Places, totals: Totals) -> Result:
        """The part of the whole batch's loss that these rows are, and its metrics."""

    # What they share.

    def place(self, placement: Placement) -> None:
        """Moves model, optimizer and reference to the devices of a mesh, in place; steps are taken there from now on.

        Batches come as before, the same ones in every process. Their number of rows is filled up to a multiple of the devices
        that rows are split over.
        """
        of_model = placement.model_shardings(self.model)
        of_optimizer = placement.optimizer_shardings(self.optimizer, of_model, self.model)
        put_module(self.model, of_model)
        put_module(self.optimizer, of_optimizer)
        reference = None if self._reference is None else module_of(self._reference)
        if reference is not None:
            put_module(reference, placement.model_shardings(reference))
        self._placement, self._shapes.row_parts = placement, placement.row_parts
        self._step = self._compiled(Lies(of_model, of_optimizer))

    def create_loss_fn(self) -> Callable[[Any, Any], Result]:
        """`loss_fn(model, batch) -> (loss, metrics)`, for `nnx.value_and_grad`, `nnx.jit` and the like.

        Always the same function. Adapters are bound to the model that it is given.
        """
        return self._loss_fn

    def compute_loss(self, batch: Any) -> Result:
        """Loss and metrics of the present model, computed at once, without an update."""
        return self._loss_fn(self.model, batch)

    def train_step(self, batch: Any, *, num_microbatches: int = 1) -> Result:
        """One update from the batch; (loss, metrics) as JAX scalars, of the model before the update."""
        return self._train([self._checked(batch)], num_microbatches)

    def train_step_accumulated(self, batches: Iterable[Any]) -> Result:
        """One update from several batches, equal to that from one batch of all their rows; whitening is over all of them.

        Only `baseline="batch"` and `scale_rewards="batch"` look at each batch alone.
        """
        return self._train([self._checked(batch) for batch in batches], 1)

    def eval_step(self, batch: Any, *, num_microbatches: int = 1) -> Result:
        """What `compute_loss` returns, compiled."""
        pieces, totals, extra = self._pieces([self._checked(batch)], num_microbatches)
        loss, metrics = self._step.value(self.model, self._frozen(), pieces, totals)
        return loss, self._finished(applying(metrics, totals) | extra)

    def update_model(self, model: Any, optimizer: Any, grads: Any, loss: jax.Array | None = None) -> Metrics:
        """The update of `train_step` for a step of one's own: clipped by this config, skipped when not finite; in place."""
        norm = getattr(self.config, "max_grad_norm", None)
        return clipped_update(model, optimizer, grads, max_grad_norm=norm, loss=loss)

    def state_dict(self) -> dict[str, Any]:
        """Copies of what an exact resume needs: model, optimizer, step, config, and what batches are padded to."""
        return {"model": snapshot(self.model), "optimizer": snapshot(self.optimizer), **self.state_beside_arrays()}

    def state_beside_arrays(self) -> dict[str, Any]:
        """The part of `state_dict` that is plain numbers and text."""
        step = getattr(self.optimizer, "step", None)
        return {
            "step": 0 if step is None else int(step[...]),
            "config": asdict(self.config),  # type: ignore[call-overload]
            "first_shape": self._shapes.first,
            "sizes": self._sizes.saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a copy of `state_dict()` of a trainer of the same form; `ConfigError` when the configs differ."""
        mine = asdict(self.config)  # type: ignore[call-overload]
        for name, value in mine.items():
            if _comparable(state["config"].get(name)) != _comparable(value):
                raise ConfigError(
                    f"{name} is {value!r} here and {state['config'].get(name)!r} in the state; "
                    "build the trainer with the config that the state was saved with"
                )
        restore(self.model, state["model"])
        restore(self.optimizer, state["optimizer"])
        first = state.get("first_shape")
        self._shapes.first = None if first is None else (int(first[0]), int(first[1]))
        self._sizes.load(state.get("sizes", []))

    def _make_loss_fn(self) -> Callable[[Any, Any], Result]:
        def loss_fn(model: Any, batch: Any) -> Result:
            inputs, extra = self._prepare(model, None, self._checked(batch))
            (inputs,) = whitened([inputs])
            places = all_places(inputs.mask.reshape(-1, inputs.mask.shape[-1]))
            loss, metrics = self._loss(model, None, inputs, places, Totals.of(inputs.mask))
            return loss, self._finished(metrics | extra)

        return loss_fn

    def _train(self, batches: list[Any], num_microbatches: int) -> Result:
        pieces, totals, extra = self._pieces(batches, num_microbatches)
        loss, metrics = self._updated(pieces, totals)
        return loss, self._finished(applying(metrics, totals) | extra)

    def _updated(self, pieces: list[tuple[Inputs, Places]], totals: Totals) -> Result:
        """One update; loss and metrics that still add up."""
        target = getattr(self.config, "target_kl", None)
        return self._step.step(self.model, self.optimizer, self._frozen(), pieces, totals, target)

    def _pieces(self, batches: list[Any], num_microbatches: int) -> tuple[list[tuple[Inputs, Places]], Totals, Metrics]:
        check_positive("num_microbatches", num_microbatches)
        if not batches:
            raise BatchError("batches is empty; an update needs at least one batch")
        pieces: list[tuple[Inputs, Places]] = []
        totals = Totals(np.float32(0), np.float32(0))
        several, extra = self._prepared(batches)
        for inputs in several:
            mask = on_host(inputs.mask)
            totals += Totals.of(mask, np)
            pieces += self._cut(inputs, mask, split_evenly(mask.shape[0], num_microbatches, self._shapes.row_parts))
        return pieces, totals, extra

    def _prepared(self, batches: list[Any]) -> tuple[list[Inputs], Metrics]:
        """Inputs of checked batches, and the metrics that follow from the batches alone."""
        frozen = self._frozen()
        padded = [self._padded(batch) for batch in batches]
        if self._placement is not None:
            padded = [self._placement.put_rows(batch) for batch in padded]
        found = [self._step.prepare(self.model, frozen, batch) for batch in padded]
        several = self._step.whitened([inputs for inputs, _ in found])
        return several, _joined([extra for _, extra in found])

    def _cut(self, inputs: Inputs, mask: np.ndarray, parts: list[np.ndarray]) -> list[tuple[Inputs, Places]]:
        """One piece of the inputs for each list of rows; `mask` is theirs, on the host."""
        policy, critic = self._adapters["policy"], self._adapters.get("value")
        share = self.share_prompts and can_share(policy, critic)
        return cut(inputs, mask, parts, needs_all_places(policy, critic), share, self._placement, self._sizes)

    def _compiled(self, lies: Lies) -> CompiledStep:
        wrt, norm = getattr(self.optimizer, "wrt", nnx.Param), getattr(self.config, "max_grad_norm", None)
        return CompiledStep(self._prepare, self._loss, wrt, norm, lies)

    def _frozen(self) -> Frozen:
        return Frozen.of(None if self._reference is None else module_of(self._reference))

    def _bound(self, name: str, model: Any) -> Any:
        """The adapter of this name on the model at hand."""
        return rebind(self._adapters[name], self.model, model)

    def _bound_reference(self, module: Any) -> Any:
        """The reference adapter, on a copy of its module where a compiled step brings one."""
        return self._reference if module is None or self._reference is None else self._reference.bind(module)

    def _may_pad(self) -> bool:
        """Arguments that others make from a batch may have a shape of their own, which padding would not fit."""
        everyone = [*self._adapters.values(), self._reference]
        return all(getattr(adapter, "model_kwargs_factory", None) is None for adapter in everyone)

    def _finished(self, metrics: Metrics) -> Metrics:
        """The metrics to show; those of a trainer that may not apply are left out here."""
        return metrics

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, UserWarning, stacklevel=4)


def applying(metrics: Metrics, totals: Totals) -> Metrics:
    """Without the means over no token."""
    return metrics if totals.tokens > 0 else {name: x for name, x in metrics.items() if name not in OF_TOKENS}


def _comparable(value: Any) -> Any:
    """JSON knows no tuples, so a pair may come back from a file as a list."""
    return tuple(value) if isinstance(value, list) else value


def _joined(extras: list[Metrics]) -> Metrics:
    """Metrics of whole batches: counts add up, the others are averaged, each over the batches that it applies to."""
    if len(extras) == 1:
        return extras[0]
    joined = {}
    for name in dict.fromkeys(name for extra in extras for name in extra):
        values = [extra[name] for extra in extras if name in extra]
        joined[name] = jnp.asarray(sum(values) if name.endswith("groups") else sum(values) / len(values))
    return joined


def config_of(kind: type[Config], config: Any, trainer: Any) -> Config:
    """The config, its defaults for None; `ConfigError` for one of another trainer or for a mapping."""
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise ConfigError(
            f"config is a {type(config).__name__}; {type(trainer).__name__} takes a {kind.__name__}, None for its defaults"
        )
    return config
