"""What a generator gave back."""

from __future__ import annotations

from flax import nnx

from upweight.errors import BatchError
from upweight.training.rl.checks import Array, PyTree, as_array, check_mask, check_rows, check_shape, check_tree
from upweight.training.rl.requests import check_steps, steps_of


@nnx.dataclass
class GeneratedBatch(nnx.Pytree):
    """B outputs of any kind. Lists and numpy arrays are converted."""

    outputs: Array = nnx.data()  # (B,…)
    conditioning: PyTree = nnx.data(default=None)  # leaves with B rows
    output_mask: Array | None = nnx.data(default=None)  # the shape of outputs
    generation_metadata: PyTree = nnx.data(default=None)  # leaves with B rows
    old_log_probs: Array | None = nnx.data(default=None)  # (B,…)
    reference_log_probs: Array | None = nnx.data(default=None)  # (B,…)
    rewards: Array | None = nnx.data(default=None)  # (B,)

    def __post_init__(self) -> None:
        check_mask("output_mask", self.output_mask)
        for name in ("outputs", "output_mask", "old_log_probs", "reference_log_probs", "rewards"):
            setattr(self, name, as_array(name, getattr(self, name)))
        if self.outputs is None or not self.outputs.shape:
            raise BatchError("outputs has no leading batch dimension; give an array of shape (B,…)")
        check_tree("conditioning", self.conditioning, self.batch_size)
        check_tree("generation_metadata", self.generation_metadata, self.batch_size)
        check_shape("output_mask", self.output_mask, tuple(self.outputs.shape), "the shape of outputs")
        check_rows("old_log_probs", self.old_log_probs, self.batch_size)
        check_rows("reference_log_probs", self.reference_log_probs, self.batch_size)
        check_shape("rewards", self.rewards, (self.batch_size,), "one reward per output")

    @property
    def batch_size(self) -> int:
        return self.outputs.shape[0]


@nnx.dataclass
class GeneratedSequenceBatch(nnx.Pytree):
    """Token sequences (B,S), prompt and response in one row. Masks have the shape of the sequences; a mask (B,S−1) over
    actions goes through `canonicalize_response_mask` first."""

    generation: GeneratedBatch = nnx.data()
    prompt_mask: Array | None = nnx.data(default=None)  # (B,S), 1 = prompt
    response_mask: Array | None = nnx.data(default=None)  # (B,S), 1 = a token that the policy chose

    def __post_init__(self) -> None:
        shape = tuple(self.sequences.shape)
        if len(shape) < 2:
            raise BatchError(f"sequences has shape {shape}, it must have a batch and a length dimension")
        for name in ("prompt_mask", "response_mask"):
            check_mask(name, getattr(self, name))
            array = as_array(name, getattr(self, name))
            check_shape(name, array, shape, "the shape of sequences; see canonicalize_response_mask for (B,S−1) masks")
            setattr(self, name, array)

    @classmethod
    def from_sequences(
        cls,
        sequences: Array,
        *,
        conditioning: PyTree = None,
        generation_metadata: PyTree = None,
        old_log_probs: Array | None = None,
        reference_log_probs: Array | None = None,
        rewards: Array | None = None,
        prompt_mask: Array | None = None,
        response_mask: Array | None = None,
    ) -> GeneratedSequenceBatch:
        """The batch and the `GeneratedBatch` in it in one call."""
        generation = GeneratedBatch(
            outputs=sequences,
            conditioning=conditioning,
            generation_metadata=generation_metadata,
            old_log_probs=old_log_probs,
            reference_log_probs=reference_log_probs,
            rewards=rewards,
        )
        return cls(generation=generation, prompt_mask=prompt_mask, response_mask=response_mask)

    @property
    def batch_size(self) -> int:
        return self.generation.batch_size

    @property
    def sequences(self) -> Array:
        return self.generation.outputs

    @property
    def conditioning(self) -> PyTree:
        return self.generation.conditioning

    @property
    def generation_metadata(self) -> PyTree:
        return self.generation.generation_metadata

    @property
    def old_log_probs(self) -> Array | None:
        return self.generation.old_log_probs

    @property
    def reference_log_probs(self) -> Array | None:
        return self.generation.reference_log_probs

    @property
    def rewards(self) -> Array | None:
        return self.generation.rewards


STEP_FIELDS = ("step_indices", "transition_log_probs", "reference_transition_log_probs", "trajectory_mask")


@nnx.dataclass
class IterativeGenerationBatch(nnx.Pytree):
    """B outputs made in T steps, with the log-probs of the transitions."""

    generation: GeneratedBatch = nnx.data()
    step_indices: Array | None = nnx.data(default=None)  # (B,T)
    transition_log_probs: Array | None = nnx.data(default=None)  # (B,T)
    reference_transition_log_probs: Array | None = nnx.data(default=None)  # (B,T)
    trajectory_mask: Array | None = nnx.data(default=None)  # (B,T)

    def __post_init__(self) -> None:
        check_steps(self, self.batch_size, STEP_FIELDS)

    @property
    def batch_size(self) -> int:
        return self.generation.batch_size

    @property
    def num_steps(self) -> int:
        """T; 0 when no field says it."""
        return steps_of(self, STEP_FIELDS)
