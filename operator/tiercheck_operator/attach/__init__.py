"""Attaches pods of other controllers as workers at admission, and creates a job for their owner."""
