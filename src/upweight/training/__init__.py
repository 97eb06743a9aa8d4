"""Batches → parameters."""
