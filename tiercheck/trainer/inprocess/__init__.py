"""Recovers in the process: a rank that is lost is replaced, and every other process keeps running."""
