"""Attach mode: pods of other controllers become workers at admission, and a job is made for their owner."""
