"""Computes the operator's decisions: where copies go, and from which version and sources jobs recover.

No I/O, no clock, no randomness: the same input gives the same answer, so every rule here can be tested by
itself.
"""
