"""What the server must not forget: jobs, batches, samples, completions, versions, events, metrics, repeated requests."""
