"""Reinforcement fine-tuning that anyone can run: rollout SDK, job server, trainers and inference engine."""

__version__ = "0.1.0"
