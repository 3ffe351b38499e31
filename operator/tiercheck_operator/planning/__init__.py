"""The decisions that need thought, as arithmetic: where copies go, and from what a job comes back.

No I/O, no clock, no randomness: the same input gives the same answer, so every rule here can be tested by
itself.
"""
