"""Proves that a version equals the state that was saved, and that a replay gives the same bits."""
