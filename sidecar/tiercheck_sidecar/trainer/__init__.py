"""Serves the pod's own trainer: orders for its launcher, slots for its ranks."""
