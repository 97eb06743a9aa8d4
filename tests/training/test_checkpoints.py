"""Checkpoints: exact, whole or absent, pruned."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from batch_makers import standard_batch

from upweight.errors import TrainingError
from upweight.models.config import DecoderConfig
from upweight.models.layers import Params
from upweight.training.checkpoints import load_checkpoint, newest_checkpoint, save_checkpoint
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.saved_folders import prune
from upweight.training.settings import LoraSettings, PolicySettings
from upweight.weights.fingerprint import fingerprint

SETTINGS = PolicySettings(learning_rate=1e-2, lora=LoraSettings(rank=4, alpha=8))


def name(trainer: PolicyTrainer) -> str:
    return fingerprint((trainer.trainable, trainer.optimizer_state))


@pytest.fixture(scope="module")
def trainer(config: DecoderConfig, params: Params) -> PolicyTrainer:
    return PolicyTrainer(config, params, SETTINGS)


def test_training_goes_on_bit_for_bit(
    trainer: PolicyTrainer, config: DecoderConfig, params: Params, tmp_path: Path
) -> None:
    batch = standard_batch(config, params)
    trainer.train(batch)
    path = save_checkpoint(tmp_path / "checkpoints", trainer)
    assert path == tmp_path / "checkpoints" / "version-000001"
    saved = name(trainer)
    trainer.train(batch)
    trainer.train(batch)

    other = PolicyTrainer(config, params, SETTINGS)
    load_checkpoint(path, other)
    assert name(other) == saved
    assert (other.version, other.updates) == (1, 1)
    other.train(batch)
    other.train(batch)
    assert name(other) == name(trainer)
    load_checkpoint(path, other)  # its arrays were not the file's
    assert name(other) == saved


def test_a_save_cut_short_is_never_picked(trainer: PolicyTrainer, tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere") is None
    trainer.version = 7
    whole = save_checkpoint(tmp_path, trainer)
    shutil.copytree(whole, tmp_path / "version-000008.orbax-checkpoint-tmp-3")
    shutil.copytree(whole, tmp_path / "version-000009.deleted")
    partial = tmp_path / "version-000010"
    shutil.copytree(whole, partial)
    (partial / "_METADATA").unlink()
    (tmp_path / "version-latest").mkdir()
    assert newest_checkpoint(tmp_path) == whole
    with pytest.raises(TrainingError, match="is no complete checkpoint"):
        load_checkpoint(partial, trainer)
    prune(tmp_path, "version", keep=3)
    assert [path.name for path in tmp_path.iterdir()] == ["version-000007"]


def test_the_newest_stay_and_a_version_can_be_saved_again(trainer: PolicyTrainer, tmp_path: Path) -> None:
    for version in (2, 9, 10, 1_000_000):
        trainer.version = version
        save_checkpoint(tmp_path, trainer)
    assert newest_checkpoint(tmp_path) == tmp_path / "version-1000000"
    gone = prune(tmp_path, "version", keep=2)
    assert {path.name for path in gone} == {"version-000002", "version-000009"}
    assert {path.name for path in tmp_path.iterdir()} == {"version-000010", "version-1000000"}
    trainer.updates = 5
    again = save_checkpoint(tmp_path, trainer)
    assert again == newest_checkpoint(tmp_path) == tmp_path / "version-1000000.1"
    assert (tmp_path / "version-1000000" / "_METADATA").is_file()  # the one that was there stays until it is pruned
    trainer.updates = 0
    load_checkpoint(again, trainer)
    assert trainer.updates == 5
    prune(tmp_path, "version", keep=0)
    assert newest_checkpoint(tmp_path) == again


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=3), LoraSettings(rank=4, targets="mlp")])
def test_a_checkpoint_of_other_settings_is_refused(
    trainer: PolicyTrainer, config: DecoderConfig, params: Params, tmp_path: Path, lora: LoraSettings | None
) -> None:
    path = save_checkpoint(tmp_path, trainer)
    other = PolicyTrainer(config, params, replace(SETTINGS, lora=lora))
    before = name(other)
    with pytest.raises(TrainingError, match=r"has shape .* the trainer needs .*: build the trainer with"):
        load_checkpoint(path, other)
    assert name(other) == before
    assert other.version == 0


TOY = """
import jax
from upweight.models.config import DecoderConfig, RopeConfig
from upweight.models.decoder import random_params
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PolicySettings
config = DecoderConfig(model_type="llama", vocab_size=5000, hidden_size=128, intermediate_size=256, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=32, max_context=64, norm_eps=1e-6, rope=RopeConfig(theta=1e3), tied=True)
trainer = PolicyTrainer(config, random_params(config, jax.random.key(0)), PolicySettings())
"""
SAVE_FOREVER = """
import sys
from upweight.training.checkpoints import save_checkpoint
while True:
    trainer.version += 1
    save_checkpoint(sys.argv[1], trainer)
    print(trainer.version, flush=True)
"""


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.soak if i else pytest.mark.ci) for i in range(3)])
def test_a_killed_writer_leaves_whole_checkpoints_only(seed: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", TOY + SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(float(np.random.default_rng(seed).uniform(0.1, 0.9)))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        announced = [first, *process.communicate()[0].splitlines()]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert int(newest.name.removeprefix("version-")) >= int(announced[-1])
    made: dict = {}
    exec(TOY, made)
    trainer = made["trainer"]
    start = name(trainer)
    for path in tmp_path.glob("version-*"):
        if path.suffix == "":
            load_checkpoint(path, trainer)
            assert name(trainer) == start
    prune(tmp_path, "version", keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [newest.name]
