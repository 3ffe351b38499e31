"""Writes versions of the training state for other tools, and makes them of what others wrote."""
