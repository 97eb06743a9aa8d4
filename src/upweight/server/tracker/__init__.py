"""A process of its own that tells one job's metrics to one experiment tracker: whatever the tracker does, it delays nobody else."""
