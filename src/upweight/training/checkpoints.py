"""Training state on disk: one folder a version, `version-000012`, written by orbax.

Invariants:
* A folder of that name is complete: it is written under another name and renamed at the end.
* One process at a time writes to a folder; what an interrupted save left behind is removed by the next prune.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upweight.errors import TrainingError
from upweight.training.policy_trainer import PolicyTrainer, check_same_form

if TYPE_CHECKING:
    from orbax.checkpoint import Checkpointer

NAME = re.compile(r"version-(\d{6,})")
LAST_WRITTEN = "_METADATA"  # orbax writes it after the arrays


def save_checkpoint(folder: str | Path, trainer: PolicyTrainer) -> Path:
    """Writes the trainer's state below `folder` and returns its path once it is complete on disk.

    A checkpoint of the same version is replaced.
    """
    path = Path(folder).absolute() / f"version-{trainer.version:06d}"
    with _checkpointer() as checkpointer:
        checkpointer.save(path, trainer.state(copy=False), force=True)
    return path


def load_checkpoint(path: str | Path, trainer: PolicyTrainer) -> None:
    """Puts the state at `path` into a trainer built with the same start model and settings.

    `TrainingError` when there is no complete checkpoint or it does not fit; the trainer is then as it was.
    """
    import orbax.checkpoint as orbax

    path = Path(path).absolute()
    if not _is_complete(path):
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
    complete = _complete(Path(folder))
    return complete[-1] if complete else None


def prune_checkpoints(folder: str | Path, keep: int) -> list[Path]:
    """Deletes all but the newest `keep` checkpoints (at least one stays), and remains of interrupted saves."""
    folder = Path(folder)
    complete = _complete(folder)
    stay = complete[-max(1, keep) :]
    gone = [path for path in sorted(folder.glob("version-*")) if path not in stay]
    for path in gone:
        # Renamed first, so that a prune cut short leaves nothing that looks complete.
        doomed = path if path not in complete else path.rename(path.with_name(f"{path.name}.deleted"))
        shutil.rmtree(doomed)
    return gone


def _complete(folder: Path) -> list[Path]:
    """Oldest first."""
    found = [path for path in folder.glob("version-*") if _is_complete(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version-")))


def _is_complete(path: Path) -> bool:
    return NAME.fullmatch(path.name) is not None and (path / LAST_WRITTEN).is_file()


def _checkpointer() -> Checkpointer:
    import orbax.checkpoint as orbax  # slow to import (0.6 s)

    return orbax.PyTreeCheckpointer()
