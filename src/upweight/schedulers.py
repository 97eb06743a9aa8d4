"""Which rollouts may start and which batch their samples enter."""
