"""A typed-batch trainer's state on disk: one folder a step, `step-000012`, written by orbax; see `saved_folders`.

In it are the model and the optimizer (with their random streams and counters), the config, and what the loop knows: how far it
has read its data, and random streams of its own. A resumed trainer goes on bit for bit on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx

from upweight.errors import ConfigError, TrainingError
from upweight.training import saved_folders
from upweight.training.rl.state import check_fits, restore, snapshot

if TYPE_CHECKING:
    from upweight.training.rl.trainer import SequenceTrainer

KIND = "step"


def save_state(
    folder: str | Path,
    trainer: SequenceTrainer[Any],
    *,
    cursor: Mapping[str, Any] | None = None,
    rngs: nnx.Rngs | None = None,
) -> Path:
    """Writes the trainer's state below `folder`; its path, once it is complete on disk.

    `cursor` is what the loop needs to find its place in the data again, anything that JSON holds; `rngs` are streams that the loop
    draws from itself. `ConfigError` for a cursor that is not JSON.
    """
    about = trainer.state_beside_arrays()
    _check_keys(cursor)
    try:
        text = json.dumps({**about, "cursor": cursor})
    except TypeError as error:
        raise ConfigError(
            f"cursor can't be written as JSON ({error}); keep to numbers, text, lists and dicts"
        ) from error
    tree: dict[str, Any] = {name: snapshot(module, copy=False) for name, module in _modules(trainer, rngs).items()}
    tree["about"] = np.frombuffer(text.encode(), np.uint8)
    path = saved_folders.free_name(Path(folder).absolute(), KIND, about["step"])
    with _checkpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def load_state(
    path: str | Path, trainer: SequenceTrainer[Any], *, rngs: nnx.Rngs | None = None
) -> dict[str, Any] | None:
    """Puts a saved state into a trainer of the same form, and into `rngs`; returns the cursor it was saved with.

    `TrainingError` when nothing complete stands at `path` or it does not fit, `ConfigError` when the configs differ; the trainer
    is then as it was.
    """
    import orbax.checkpoint as orbax

    path = Path(path).absolute()
    if not saved_folders.is_complete(path, KIND):
        raise TrainingError(f"{path} is no complete state; use newest_state to find one")
    modules = _modules(trainer, rngs)
    with _checkpointer() as checkpointer:
        # Compared before anything is read: a restore that fails half way leaves reads in flight behind.
        saved = checkpointer.metadata(path).item_metadata.tree
        for name, module in modules.items():
            if name not in saved:
                raise TrainingError(f"{path} was saved without {name}")
            check_fits(module, saved[name])
        wanted: dict[str, Any] = {name: snapshot(module, copy=False) for name, module in modules.items()}
        wanted["about"] = np.zeros(saved["about"].shape, np.uint8)
        arguments = orbax.checkpoint_utils.construct_restore_args(wanted)
        only = orbax.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
        state = checkpointer.restore(path, args=only)
    about = json.loads(bytes(np.asarray(state.pop("about"))))
    trainer.load_state_dict({**state, **about})
    if rngs is not None:
        restore(rngs, state["rngs"])
    cursor: dict[str, Any] | None = about["cursor"]
    return cursor


def newest_state(folder: str | Path) -> Path | None:
    """The complete state of the highest step below `folder`, of several the last one; None without one."""
    return saved_folders.newest(Path(folder), KIND)


def prune_states(folder: str | Path, keep: int) -> list[Path]:
    """Deletes all but the newest `keep` states (at least one stays), and remains of interrupted saves."""
    return saved_folders.prune(Path(folder), KIND, keep)


def _check_keys(cursor: Any) -> None:
    """`ConfigError` for keys that JSON would turn into text."""
    if isinstance(cursor, Mapping):
        for key in cursor:
            if not isinstance(key, str):
                raise ConfigError(f"cursor has the key {key!r}, which JSON holds as text only; use {str(key)!r}")
    for part in cursor.values() if isinstance(cursor, Mapping) else cursor if isinstance(cursor, list | tuple) else ():
        _check_keys(part)


def _modules(trainer: SequenceTrainer[Any], rngs: nnx.Rngs | None) -> dict[str, Any]:
    modules = {"model": trainer.model, "optimizer": trainer.optimizer}
    return modules if rngs is None else {**modules, "rngs": rngs}


def _checkpointer() -> Any:
    import orbax.checkpoint as orbax  # slow to import (0.6 s)

    return orbax.PyTreeCheckpointer()
