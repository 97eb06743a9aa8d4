"""A job's life: HTTP API, store, worker (engine + trainer)."""
