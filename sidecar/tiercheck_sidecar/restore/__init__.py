"""Brings every own rank to the wanted version, verified."""
