"""A whole reinforcement run in one process and one script: rollouts, rewards, updates, new weights. No server.

Run with `python -m upweight.examples.online --model SmolLM2-135M-Instruct`. The model learns to answer with vowels: their
share rises from 0.31 to about 0.5 in 16 steps, some two minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass, fields

from upweight.errors import ModelError
from upweight.inference import InferenceScheduler
from upweight.online import BaseRewardModel, OnlineStep, OnlineTrainer, RolloutGenerator, RolloutRunner
from upweight.training.policy_trainer import PolicyTrainer
from upweight.training.settings import PolicySettings
from upweight.weights.loading import load_model, save_model

QUESTIONS = ("Tell me about the sea.", "What do you like?", "Name an animal.", "Say something nice.")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes that suit a laptop."""

    model: str = "SmolLM2-135M-Instruct"
    steps: int = 16
    group_size: int = 8
    max_tokens: int = 16
    learning_rate: float = 3e-5
    replays: int = 1  # optimizer steps on each rollout
    seed: int = 0
    save: str = ""  # folder for the trained model; empty = it is not kept


class VowelShare(BaseRewardModel):
    """Share of the characters that are vowels."""

    def score(self, prompts: list[str], responses: list[list[str]]) -> list[list[float]]:
        return [[_vowel_share(text) for text in group] for group in responses]


def _vowel_share(text: str) -> float:
    return sum(character in "aeiou" for character in text.lower()) / max(len(text), 1)


def train(settings: Settings) -> list[float]:
    """Mean reward of each step."""
    model = load_model(settings.model)
    policy = PolicySettings(algorithm="grpo", advantage="group", learning_rate=settings.learning_rate)
    trainer = PolicyTrainer(model.config, model.params, policy)
    batch = {"messages": [[{"role": "user", "content": question}] for question in QUESTIONS]}
    rewards: list[float] = []
    with InferenceScheduler(model, model.tokenizer, max_batch_size=len(QUESTIONS) * settings.group_size) as scheduler:
        generator = RolloutGenerator(
            scheduler,
            model.tokenizer,
            max_tokens=settings.max_tokens,
            group_size=settings.group_size,
            seed=settings.seed,
        )
        loop = OnlineTrainer(RolloutRunner(generator, VowelShare(), rollout_interval=settings.replays), trainer)
        for _ in range(settings.steps):
            step = loop.train(batch)
            rewards.append(step.reward_mean)
            print(_line(step), flush=True)
    if settings.save:
        save_model(settings.save, model.config, model.raw_config, trainer.policy_params(), model.tokenizer)
    return rewards


def _line(step: OnlineStep) -> str:
    answer = " ".join(step.result.response_texts[0][0].split())
    made = "fresh" if step.is_fresh else "replayed"
    return f"version {step.version:3}  reward {step.reward_mean:.3f}  {made}  {answer[:60]!r}"


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Settings):
        default = field.default
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(default), default=default)
    settings = Settings(**vars(parser.parse_args()))
    try:
        rewards = train(settings)
    except ModelError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
