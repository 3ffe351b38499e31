"""Attach mode makes pods of other controllers workers at admission, and a job for their owner."""
