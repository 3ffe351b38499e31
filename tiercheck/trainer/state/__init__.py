"""The state of a training script, as saving and restoring mean it."""
