"""The options of the method object over the public wire: real server, worker, engine and trainer on a tiny model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from safetensors import safe_open

from tests.e2e.conftest import BATCH, Site
from tests.models.golden import load_golden
from upweight.demo.server_process import ServerProcess
from upweight.weights.loading import save_model

FATES = ("trained", "zero_advantage", "masked", "stale", "refused")


@pytest.fixture(scope="module")
def site(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("methods") / "home"
    running = Site(home, str(tiny_model_folder), ServerProcess(home))
    yield running
    running.server.stop()


@dataclass
class Job:
    """A job and a client that rolls out for it by hand."""

    site: Site
    id: str
    http: httpx.Client

    @property
    def prefix(self) -> str:
        return f"/v1alpha1/fine_tuning/jobs/{self.id}"

    def ask(self, count: int, **body: Any) -> list[dict[str, Any]]:
        """Samples with their finish reason; the raw reward is the share of even token ids."""
        asked = {"prompt": "Number 7", "n": count, "logprobs": 0, "return_token_ids": True, **body}
        answer = self.http.post(f"{self.prefix}/inference/openai/v1/completions", json=asked).raise_for_status().json()
        found = []
        for choice in answer["choices"]:
            prompt, output = choice.get("prompt_token_ids", answer.get("prompt_token_ids")), choice["token_ids"]
            found.append(
                {
                    "object": "fine_tuning.rl_sample",
                    "id": os.urandom(8).hex(),
                    "token_ids": [*prompt, *output],
                    "logprobs": [0.0] * len(prompt) + choice["logprobs"]["token_logprobs"],
                    "mask": [0] * len(prompt) + [1] * len(output),
                    "normalized_reward": fmean(1.0 - token % 2 for token in output),
                    "metadata": {"finish": choice["finish_reason"]},
                    "debug_info": {"task_id": "one"},
                }
            )
        return found

    def upload(self, index: int, samples: list[dict[str, Any]]) -> None:
        self.http.post(f"{self.prefix}/batches", json={"index": index}).raise_for_status()
        path = f"{self.prefix}/batches/{index}/samples"
        assert self.http.post(path, json={"samples": samples}).raise_for_status().json()["status"] == "filled"

    def await_version(self, version: int) -> None:
        end = time.monotonic() + 60
        while self.site.progress(self.id)["inference_version"] != version:
            assert time.monotonic() < end
            time.sleep(0.05)

    def events(self) -> list[str]:
        answer = self.http.get(f"/v1/fine_tuning/jobs/{self.id}/events", params={"limit": 100})
        return [event["message"] for event in answer.json()["data"]]


Start = Callable[..., Job]


@pytest.fixture
def start(site: Site) -> Iterator[Start]:
    """`start(**reinforcement)` creates a job, which gives its place free at the end of the test."""
    key, jobs = {"Authorization": f"Bearer {site.server.key}"}, []
    with httpx.Client(base_url=site.server.url, headers=key, timeout=60) as http:

        def begin(*, model: str = site.model, **reinforcement: Any) -> Job:
            jobs.append(replace(site, model=model).create(**reinforcement))
            return Job(site, jobs[-1], http)

        yield begin
        for job in jobs:
            http.post(f"/v1/fine_tuning/jobs/{job}/cancel")


def checked(job: Job, batches: int) -> dict[str, Any]:
    """The finished job, whose numbers add up."""
    end = job.site.wait(job.id)
    ledger = end["ledger"]
    assert ledger["accepted"] == batches * BATCH == sum(ledger[fate] for fate in FATES)
    for fate in FATES:
        assert ledger[fate] == sum(version["metrics"][f"samples_{fate}"] for version in end["versions"][1:])
    return end


@pytest.mark.ci
def test_ppo_with_a_critic_survives_a_kill_and_hands_only_the_policy_over(site: Site, start: Start) -> None:
    """Version 2 is made again from version 1's checkpoint; the server compares the fingerprints itself."""
    critic = {"learning_rate": 1e-2, "gae_lambda": 0.9, "warmup_batches": 1}
    options = {"algorithm": "ppo", "critic": critic, "lora": {"rank": 4}, "beta": 0.05, "correction": "decoupled"}
    more = {"epochs": 2, "minibatch_size": BATCH // 2, "learning_rate": 1e-2, "checkpoint_every": 3}
    job = start(**options, **more)
    for index in range(2):
        job.upload(index, job.ask(BATCH))
    job.await_version(2)
    os.kill(site.progress(job.id)["worker"]["pid"], signal.SIGKILL)
    job.upload(2, job.ask(BATCH))
    end = checked(job, 3)
    first, second, third = (version["metrics"] for version in end["versions"][1:])
    assert end["ledger"]["trained"] == 3 * BATCH
    assert any("is at version 2 again, with the recorded fingerprint" in text for text in job.events())
    names = [version["fingerprint"] for version in end["versions"]]
    assert names[0] == names[1] != names[2] != names[3]
    assert first["value_mean"] == 0.0
    assert "grad_norm" not in first
    for metrics in (second, third):
        assert metrics["grad_norm"] > 0
        assert metrics["value_loss"] > 0
        assert metrics["value_mean"] != 0
        assert metrics["mismatch_max"] < 2e-5 if "mismatch_max" in metrics else True
    assert "kl" in second
    assert third["kl"] != 0
    with safe_open(next(Path(end["weights"]).glob("*.safetensors")), "numpy") as saved:
        names = set(saved.keys())
    with safe_open(next(Path(site.model).glob("*.safetensors")), "numpy") as start:
        assert names == set(start.keys())


def test_left_out_samples_are_named(start: Start) -> None:
    """Group baseline with exact KL in the loss: cut answers are masked, one far from the policy is stale."""
    options = {"algorithm": "reinforce_pp_baseline", "advantage": "group", "mask_truncated": True}
    more = {"correction": "masked", "beta": 0.1, "kl_estimator": "exact", "learning_rate": 1e-2, "num_batches": 2}
    job = start(**options, **more)
    half = BATCH // 2
    for index in range(2):
        job.await_version(index)
        whole, cut = job.ask(half, stop=list("aeiost"), max_tokens=40), job.ask(half)
        finish = [sample["metadata"]["finish"] for sample in whole + cut]
        assert finish == ["stop"] * half + ["length"] * half
        whole[0]["logprobs"] = [value - 3 if value else 0.0 for value in whole[0]["logprobs"]]
        for place, sample in enumerate(whole + cut):  # none is a mean of others, so that each has an advantage
            sample["normalized_reward"] = (place + 1) ** 0.5
        job.upload(index, whole + cut)
    end = checked(job, 2)
    ledger = end["ledger"]
    assert (ledger["masked"], ledger["truncated"], ledger["stale"]) == (BATCH, BATCH, 2)
    assert ledger["trained"] == 2 * half - 2
    assert ledger["unmatched"] == 0
    first, second = (version["metrics"] for version in end["versions"][1:])
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)
    assert second["kl"] > 1e-4
    assert 0 < first["masked_token_fraction"] < 1
    assert sum("the length limit cut" in text for text in job.events()) == 1
    assert sum("correction masked" in text for text in job.events()) == 1


OPTIONS = [
    {"algorithm": "reinforce_pp", "beta": 0.05, "kl_estimator": "exact", "lora": {"rank": 4}},
    {"algorithm": "reinforce", "beta": 0.05, "correction": "masked"},
    {"algorithm": "reinforce_pp_baseline", "advantage": "reward", "correction": "decoupled"},
    {"algorithm": "dapo", "advantage": "group"},
    *({"algorithm": name, "advantage": "group"} for name in ("dr_grpo", "gspo", "cispo", "rloo", "bnpo")),
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(one, id=one["algorithm"], marks=pytest.mark.soak if i else pytest.mark.ci)
        for i, one in enumerate(OPTIONS)
    ],
)
def test_each_other_option_trains_a_batch(start: Start, options: dict[str, Any]) -> None:
    job = start(**options, learning_rate=1e-2, num_batches=1)
    job.upload(0, job.ask(BATCH))
    end = checked(job, 1)
    assert end["versions"][1]["metrics"]["update_skipped"] == 0
    if options["algorithm"] == "dapo":  # every answer of this model is cut, which dapo leaves out
        assert end["ledger"]["masked"] == BATCH
    else:
        assert end["ledger"]["trained"] == BATCH
        assert end["versions"][1]["fingerprint"] != end["versions"][0]["fingerprint"]


@pytest.mark.soak
def test_ppo_raises_the_reward_of_a_job(start: Start, tmp_path: Path) -> None:
    """Share of even token ids of a model with 257 of them, over 10 batches of 16 on-policy samples."""
    small = load_golden("llama-gqa-tied")
    save_model(tmp_path / "small", small.config, small.raw_config, small.params, small.tokenizer)
    options = {"algorithm": "ppo", "learning_rate": 1e-2, "critic": {"learning_rate": 1e-2}, "epochs": 2}
    job = start(**options, model=str(tmp_path / "small"), batch_size=16, num_batches=10)
    rewards = []
    for index in range(10):
        job.await_version(index)
        samples = job.ask(16, prompt=[2, 2, 9, 0, 30], ignore_eos=True)
        rewards.append(fmean(sample["normalized_reward"] for sample in samples))
        job.upload(index, samples)
    assert rewards[0] < 0.75, rewards
    assert fmean(rewards[-3:]) > 0.95, rewards
