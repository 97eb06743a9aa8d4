"""The one-script example on a model of 259 byte tokens: it learns within seconds, and writes the model it made."""

from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from tests.conftest import TINY_CONFIG
from upweight.examples.online import Settings, VowelShare, main, train
from upweight.models.config import DecoderConfig
from upweight.models.decoder import random_params
from upweight.tokenizer import Tokenizer
from upweight.tokenizer.parts import TokenizerParts
from upweight.weights.loading import load_model, save_model

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}<|im_start|>"


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    special = ["<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Core(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    parts = TokenizerParts(
        core=core, eos_ids=(1,), pad_id=1, chat_template=TEMPLATE, named_tokens={"eos_token": special[1]}
    )
    raw = {**TINY_CONFIG, "vocab_size": len(tokens)}
    config = DecoderConfig.from_huggingface(raw)
    folder = tmp_path_factory.mktemp("bytes") / "model"
    save_model(folder, config, raw, random_params(config, jax.random.key(0)), Tokenizer(parts))
    return folder


def test_it_learns(byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = train(
        Settings(model=str(byte_model), steps=24, max_tokens=12, learning_rate=0.02, save=str(tmp_path / "trained"))
    )
    assert np.mean(rewards[-4:]) > 0.5 > 0.1 > rewards[0], rewards
    assert len(capsys.readouterr().out.splitlines()) == 24
    before, after = load_model(str(byte_model)), load_model(str(tmp_path / "trained"))
    assert after.config == before.config
    assert not np.array_equal(after.params["embed"], before.params["embed"])


def test_rollouts_are_replayed(byte_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Settings(model=str(byte_model), steps=4, max_tokens=4, replays=2))
    made = [line.split()[4] for line in capsys.readouterr().out.splitlines()]
    assert made == ["fresh", "replayed", "fresh", "replayed"]


def test_the_reward() -> None:
    assert VowelShare().score(["p"], [["aei", "xyzE", ""]]) == [[1.0, 0.25, 0.0]]


def test_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["online", "--model", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: no model at ")
