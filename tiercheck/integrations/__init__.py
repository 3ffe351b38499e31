"""Integrates Checkpointer with frameworks that own the training loop."""
