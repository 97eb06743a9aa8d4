"""The two forms of attention against each other and against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from upweight.inference import runner as runner_module
from upweight.inference.attention import Attention, Fused, Products, attention_for
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.programs import Programs
from upweight.inference.types import SamplingParams
from upweight.models.config import DecoderConfig
from upweight.weights.loading import LoadedModel

B, T, W, N, K, D = 3, 4, 9, 4, 2, 8


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Float64, one query at a time."""
    out = np.zeros(q.shape)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for n in range(N):
                scores = k[b, :, n // (N // K)] @ q[b, t, n] / np.sqrt(D)
                p = np.where(allowed[b, t], np.exp(scores - scores.max()), 0)
                out[b, t, n] = (p / p.sum()) @ v[b, :, n // (N // K)]
    return out


@pytest.mark.parametrize("attention", [Products(), Fused()])
def test_both_forms_are_softmax_attention(attention: Attention) -> None:
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal(shape) for shape in ((B, T, N, D), (B, W, K, D), (B, W, K, D)))
    last = np.array([5, 0, 8])
    allowed = np.arange(W)[None, None] <= np.minimum(last[:, None], np.arange(T)[None] + last[:, None])[..., None]
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    np.testing.assert_allclose(
        attention.over_pages(*arrays, jnp.asarray(allowed)), reference(q, k, v, allowed), atol=1e-5
    )
    new_k, new_v = (draw.standard_normal((B, K, D)) for _ in range(2))
    stored = attention.to_slots(*arrays[1:])
    assert attention.width(stored) == W
    stored = attention.write(
        stored, jnp.asarray(last), jnp.asarray(new_k, jnp.float32), jnp.asarray(new_v, jnp.float32)
    )
    k[np.arange(B), last], v[np.arange(B), last] = new_k, new_v
    found = attention.over_slots(arrays[0][:, 0], stored, jnp.asarray(allowed[:, 0]))
    np.testing.assert_allclose(found, reference(q[:, :1], k, v, allowed[:, :1])[:, 0], atol=1e-5)


def test_an_engine_on_fused_attention_gives_the_same_answers(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [list(range(20, 45)), [11], [5, 6, 7]]
    plain = Engine(model.config, model.params, model.tokenizer, max_rows=4).start()
    expected = answers_to(plain, prompts, params)
    plain.stop()
    monkeypatch.setattr(runner_module, "Programs", lambda config: Programs(config, Fused()))
    fused = Engine(model.config, model.params, model.tokenizer, max_rows=4).start()
    for one, other in zip(answers_to(fused, prompts, params), expected, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    fused.stop()


def test_a_cpu_and_soft_caps_use_products(model: LoadedModel) -> None:
    config: DecoderConfig = model.config
    assert isinstance(attention_for(config), Products)
    assert isinstance(attention_for(config, "gpu"), Fused)
