"""Reinforcement learning on typed batches."""
