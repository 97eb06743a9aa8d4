"""Text ↔ tokens, chat templates."""
