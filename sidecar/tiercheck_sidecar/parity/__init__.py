"""Protects state by parity, for a fraction of a copy's memory.

Blocks are folded as chunks arrive, and unfolded to rebuild what is lost.
"""
