"""Derives what one observation of a job shows."""
