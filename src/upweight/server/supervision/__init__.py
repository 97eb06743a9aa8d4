"""Keeps a worker process per running job alive, feeds it filled batches and records what it answers."""
