"""Tensors one by one: their parts, samples of their bytes, and how they come off a device."""
