"""Runs a user's rollout function against a job and uploads what it returns."""
