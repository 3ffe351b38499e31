"""Reads and verifies what a recovery would read, while the job trains."""
