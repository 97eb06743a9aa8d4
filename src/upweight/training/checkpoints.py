"""A job's training state on disk: one folder a version, `version-000012`, written by orbax; see `saved_folders`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from upweight.errors import TrainingError
from upweight.training import saved_folders
from upweight.training.policy_trainer import PolicyTrainer, check_same_form

if TYPE_CHECKING:
    from orbax.checkpoint import Checkpointer

KIND = "version"


def save_checkpoint(folder: str | Path, trainer: PolicyTrainer) -> Path:
    """Writes the trainer's state below `folder` and returns its path once it is complete on disk.

    One of the same version stays until it is pruned; the new one is the newest, `version-000012.1`.
    """
    path = saved_folders.free_name(Path(folder).absolute(), KIND, trainer.version)
    with _checkpointer() as checkpointer:
        checkpointer.save(path, trainer.state(copy=False))
    return path


def load_checkpoint(path: str | Path, trainer: PolicyTrainer) -> None:
    """Puts the state at `path` into a trainer built with the same start model and settings.

    `TrainingError` when there is no complete checkpoint or it does not fit; the trainer is then as it was.
    """
    import orbax.checkpoint as orbax

    path = Path(path).absolute()
    if not saved_folders.is_complete(path, KIND):
        raise TrainingError(f"{path} is no complete checkpoint; use newest_checkpoint to find one")
    mine = trainer.state(copy=False)
    with _checkpointer() as checkpointer:
        # Compared before anything is read: a restore that fails half way leaves reads in flight behind.
        saved = checkpointer.metadata(path).item_metadata.tree
        check_same_form(orbax.tree.serialize_tree(mine, keep_empty_nodes=True), saved)
        arguments = orbax.checkpoint_utils.construct_restore_args(mine)
        state: dict[str, Any] = checkpointer.restore(path, item=mine, restore_args=arguments)
    trainer.load_state(state, copy=False)


def newest_checkpoint(folder: str | Path) -> Path | None:
    """The complete checkpoint of the highest version below `folder`; None without one."""
    return saved_folders.newest(Path(folder), KIND)


def _checkpointer() -> Checkpointer:
    import orbax.checkpoint as orbax  # slow to import (0.6 s)

    return orbax.PyTreeCheckpointer()
