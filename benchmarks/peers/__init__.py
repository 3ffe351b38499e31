"""Runs others who do the same work, each in its own environment, by one loop."""
