"""An engine may hold the very arrays that are trained: steps never donate them."""

import threading
from pathlib import Path

import jax
import numpy as np

from tests.training.rl import small
from upweight.inference.engine import Engine
from upweight.inference.gather import answers_to
from upweight.inference.types import SamplingParams
from upweight.models.decoder import Decoder
from upweight.training import GeneratedSequenceBatch, SFTTrainer
from upweight.weights.loading import load_model

LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


def test_an_engine_decodes_the_same_while_its_weights_are_trained(tiny_model_folder: Path) -> None:
    loaded = load_model(str(tiny_model_folder))
    model = Decoder(loaded.config, loaded.params)
    trainer = SFTTrainer(model, small.optimizer(model, 0.5))
    ids = np.random.default_rng(0).integers(0, loaded.config.vocab_size, (4, 8)).astype(np.int32)
    batch = GeneratedSequenceBatch.from_sequences(ids, response_mask=np.ones(ids.shape, np.float32))
    prompts = [ids[0].tolist()]
    trained, stop, answers = threading.Event(), threading.Event(), []

    with Engine(loaded.config, model.params(), loaded.tokenizer, max_rows=2) as engine:
        (alone,) = answers_to(engine, prompts, LONG)

        def decode() -> None:
            while not stop.is_set():
                answers.append((trained.is_set(), answers_to(engine, prompts, LONG)[0].token_ids))

        thread = threading.Thread(target=decode)
        thread.start()
        try:
            before = small.params(model)
            losses = [float(trainer.train_step(batch)[0]) for _ in range(3)]
            jax.block_until_ready(model.params())
            trained.set()
        finally:
            stop.set()
            thread.join(60)
    assert losses[2] < losses[0]
    assert any((a != b).any() for a, b in zip(before, small.params(model), strict=True))
    assert any(not after for after, _ in answers)
    assert all(found == alone.token_ids for _, found in answers)
