"""Determines what failed, the cause, and what follows from it."""
