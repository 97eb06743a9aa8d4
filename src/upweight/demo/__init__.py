"""The main job as one call."""
