"""Handles single tensors: their parts, samples of their bytes, and copies off a device."""
