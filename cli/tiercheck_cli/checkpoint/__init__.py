"""Writes versions of the training state for other tools, and imports what other tools wrote."""
