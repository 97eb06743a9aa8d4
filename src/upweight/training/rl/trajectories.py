"""Step-by-step trajectories outside text."""

from __future__ import annotations

from flax import nnx

from upweight.training.rl.checks import Array, as_array, check_rows


@nnx.dataclass
class TrajectoryBatch(nnx.Pytree):
    """B transitions; `BatchError` (a ValueError) when a field has another number of rows."""

    states: Array = nnx.data()  # (B,…)
    actions: Array | None = nnx.data(default=None)  # (B,…)
    rewards: Array | None = nnx.data(default=None)  # (B,…)
    old_log_probs: Array | None = nnx.data(default=None)  # (B,…)
    returns: Array | None = nnx.data(default=None)  # (B,…)
    advantages: Array | None = nnx.data(default=None)  # (B,…)
    dones: Array | None = nnx.data(default=None)  # (B,…)

    def __post_init__(self) -> None:
        self.states = as_array("states", self.states)
        for name in ("actions", "rewards", "old_log_probs", "returns", "advantages", "dones"):
            array = as_array(name, getattr(self, name))
            check_rows(name, array, self.batch_size)
            setattr(self, name, array)

    @property
    def batch_size(self) -> int:
        return self.states.shape[0]
