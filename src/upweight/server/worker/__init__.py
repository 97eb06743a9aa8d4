"""A job's worker process: model, engine and trainer behind the routes of `worker_protocol`."""
