"""Derives the status and the Events."""
