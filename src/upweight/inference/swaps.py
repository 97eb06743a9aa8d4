"""New weights between two decode steps, and what running rows do then.

Invariants:
* Swaps take effect in the order asked for, each whole: weights, version and known prefixes together.
* Whoever asked learns the outcome.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from upweight.errors import ConfigError, EngineError
from upweight.inference.scheduler import Scheduler
from upweight.models.layers import Params

log = logging.getLogger(__name__)

OnUpdate = Literal["continue", "recompute", "drain", "abort"]
"""What running rows do when the weights change: go on over the keys and values they have, compute these again first, finish before
the swap while nothing new is admitted, or end as aborted."""

CacheOnUpdate = Literal["version", "flush", "keep"]
"""What becomes of known prefixes: used only under the version that computed them (`version`, `flush`: freed at once, since no later
request may use them), or used on under every version (`keep`: cheaper, and log-probs no longer agree with a full forward pass)."""


def check_policies(on_update: str, cache_on_update: str) -> None:
    """`ConfigError` naming what is not one of the choices."""
    for name, value, known in (
        ("on_update", on_update, get_args(OnUpdate)),
        ("cache_on_update", cache_on_update, get_args(CacheOnUpdate)),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if cache_on_update == "keep":
        log.warning("known prefixes are kept when weights change: new answers may rest on old keys and values")


def fitted(params: Params, like: Params) -> Params:
    """`params` in the precisions of `like`. `EngineError` naming the first array that is missing, unknown or of another shape."""
    wanted, given = (dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in (like, params))
    for path in [*wanted, *given]:
        if path not in given or path not in wanted or jnp.shape(given[path]) != wanted[path].shape:
            needs = f"shape {wanted[path].shape}" if path in wanted else "nothing"
            found = f"shape {jnp.shape(given[path])}" if path in given else "nothing"
            raise EngineError(f"weights{jax.tree_util.keystr(path)}: the engine needs {needs}, {found} was given")
    return jax.tree.map(lambda new, old: new if new.dtype == old.dtype else jnp.asarray(new, old.dtype), params, like)


def transport(given: Params, used: Params) -> str:
    """How weights came to the engine: it uses the very arrays that it was given, or has some of them in another precision."""
    pairs = list(zip(jax.tree.leaves(given), jax.tree.leaves(used), strict=True))
    copied = sum(one is not other for one, other in pairs)
    return f"in process, {copied} of {len(pairs)} arrays converted" if copied else "in process, arrays shared"


class Swap:
    """One change of weights: asked for in any thread, performed in the engine's."""

    def __init__(self, params: Params, version: int) -> None:
        self.params = params
        self.version = version
        self.done = threading.Event()
        self.error: BaseException | None = None


class WeightSwaps:
    """Swaps that wait. Used in the engine's thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        on_update: OnUpdate,
        install: Callable[[Params, int], None],
        abort_running: Callable[[str], None],
    ) -> None:
        self._scheduler = scheduler
        self._on_update = on_update
        self._install = install
        self._abort_running = abort_running
        self._waiting: deque[Swap] = deque()

    def add(self, swap: Swap) -> None:
        self._waiting.append(swap)

    def perform(self) -> bool:
        """Makes what waits current as far as the policy lets it; whether anything changed."""
        changed = False
        while self._waiting and not self._must_drain():
            self._one(self._waiting.popleft())
            changed = True
        self._scheduler.draining = bool(self._waiting)
        return changed

    def _must_drain(self) -> bool:
        return self._on_update == "drain" and bool(self._scheduler.running or self._scheduler.interrupted)

    def _one(self, swap: Swap) -> None:
        if self._on_update == "abort":
            self._abort_running(f"the weights changed to version {swap.version}")
        elif self._on_update == "recompute":
            self._scheduler.restart_running()
        try:
            self._install(swap.params, swap.version)
        except Exception as error:  # noqa: BLE001 - told to whoever asked; the weights are as they were
            swap.error = error
        finally:
            swap.done.set()

    def refuse(self, why: str) -> None:
        """The engine ends: what waits is not performed."""
        while self._waiting:
            swap = self._waiting.popleft()
            swap.error = EngineError(why)
            swap.done.set()
