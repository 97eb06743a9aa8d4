"""Prompts → tokens: scheduler (plain Python), runner (device), engine (loop)."""
