"""Saves the state while training continues, and restores it bit for bit."""
