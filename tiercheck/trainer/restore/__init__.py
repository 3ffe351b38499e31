"""A saved state on its way back into a model and its optimizers."""
