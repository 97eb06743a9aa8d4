"""What a generator is asked for."""

from __future__ import annotations

from flax import nnx

from upweight.errors import BatchError
from upweight.training.rl.checks import Array, PyTree, as_array, check_positive, check_rows, check_shape, check_tree


@nnx.dataclass
class GenerationRequest(nnx.Pytree):
    """B outputs; `conditioning` and `generation_metadata` are trees of arrays with B rows."""

    num_samples: int = nnx.static(default=1)
    conditioning: PyTree = nnx.data(default=None)
    generation_metadata: PyTree = nnx.data(default=None)

    def __post_init__(self) -> None:
        check_positive("num_samples", self.num_samples)
        check_tree("conditioning", self.conditioning, self.num_samples)
        check_tree("generation_metadata", self.generation_metadata, self.num_samples)

    @property
    def batch_size(self) -> int:
        return self.num_samples


@nnx.dataclass
class SequenceGenerationRequest(nnx.Pytree):
    """`num_generations` continuations of each of B prompts of P tokens.

    `prompt_mask` is 1 on real prompt tokens. temperature 0 is greedy; top_k None or 0 and top_p None are off. A `seed` makes the
    draw repeatable; `eos_id` ends a continuation, `pad_id` fills what follows.
    """

    request: GenerationRequest = nnx.data()
    prompts: Array | None = nnx.data(default=None)  # int (B,P)
    prompt_mask: Array | None = nnx.data(default=None)  # (B,P)
    num_generations: int = nnx.static(default=1)
    max_new_tokens: int = nnx.static(default=1)
    temperature: float = nnx.static(default=1.0)
    top_k: int | None = nnx.static(default=None)
    top_p: float | None = nnx.static(default=None)
    seed: int | None = nnx.static(default=None)
    eos_id: int | None = nnx.static(default=None)
    pad_id: int | None = nnx.static(default=None)

    def __post_init__(self) -> None:
        check_positive("num_generations", self.num_generations)
        check_positive("max_new_tokens", self.max_new_tokens)
        if not self.temperature >= 0:
            raise BatchError(f"temperature is {self.temperature}, it must be at least 0")
        if self.top_k is not None and self.top_k < 0:
            raise BatchError(f"top_k is {self.top_k}, it must be at least 0; 0 or None switches it off")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BatchError(f"top_p is {self.top_p}, it must be in (0, 1]; None switches it off")
        self._check_prompts()

    def _check_prompts(self) -> None:
        self.prompts = as_array("prompts", self.prompts)
        self.prompt_mask = as_array("prompt_mask", self.prompt_mask)
        if self.prompts is None:
            if self.prompt_mask is not None:
                raise BatchError("prompt_mask is given without prompts; give both or neither")
            return
        if self.prompts.ndim != 2:
            raise BatchError(f"prompts has shape {tuple(self.prompts.shape)}, it must be 2-D: batch, prompt length")
        check_rows("prompts", self.prompts, self.batch_size)
        check_shape("prompt_mask", self.prompt_mask, self.prompts.shape, "the shape of prompts")

    @property
    def batch_size(self) -> int:
        return self.request.batch_size

    @property
    def total_samples(self) -> int:
        return self.batch_size * self.num_generations

    @property
    def prompt_length(self) -> int:
        """P; 0 without prompts."""
        return 0 if self.prompts is None else self.prompts.shape[1]

    @property
    def conditioning(self) -> PyTree:
        return self.request.conditioning

    @property
    def generation_metadata(self) -> PyTree:
        return self.request.generation_metadata


@nnx.dataclass
class IterativeGenerationRequest(nnx.Pytree):
    """B outputs made in T steps, as a diffusion model makes them."""

    request: GenerationRequest = nnx.data()
    step_indices: Array | None = nnx.data(default=None)  # (B,T)
    trajectory_mask: Array | None = nnx.data(default=None)  # (B,T)

    def __post_init__(self) -> None:
        check_steps(self, self.batch_size, ("step_indices", "trajectory_mask"))

    @property
    def batch_size(self) -> int:
        return self.request.batch_size

    @property
    def num_steps(self) -> int:
        """T; 0 when no field says it."""
        return steps_of(self, ("step_indices", "trajectory_mask"))

    @property
    def conditioning(self) -> PyTree:
        return self.request.conditioning

    @property
    def generation_metadata(self) -> PyTree:
        return self.request.generation_metadata


def check_steps(owner: nnx.Pytree, rows: int, names: tuple[str, ...]) -> None:
    """The named fields are None or all of one shape (rows, T)."""
    shape: tuple[int, ...] | None = None
    for name in names:
        array = as_array(name, getattr(owner, name))
        setattr(owner, name, array)
        if array is None:
            continue
        if array.ndim != 2 or array.shape[0] != rows:
            raise BatchError(f"{name} has shape {tuple(array.shape)}, it must be ({rows}, steps)")
        shape = shape or tuple(array.shape)
        check_shape(name, array, shape, "the shape of the fields before it")


def steps_of(owner: nnx.Pytree, names: tuple[str, ...]) -> int:
    given = (getattr(owner, name) for name in names)
    return next((array.shape[1] for array in given if array is not None), 0)
