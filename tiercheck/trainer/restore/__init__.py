"""Loads a saved state back into a model and its optimizers."""
