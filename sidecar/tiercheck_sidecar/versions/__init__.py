"""Determines which versions are complete in each tier, and what may be freed."""
