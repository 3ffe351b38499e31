"""Represents the state of a training script for saving and restoring."""
