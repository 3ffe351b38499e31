"""Describes the data in memory: slots, their tensors, and the pieces of a state."""
