"""Implements `tiercheck status`: the state of jobs, and what to do."""
