"""Copies the training state into slots."""
