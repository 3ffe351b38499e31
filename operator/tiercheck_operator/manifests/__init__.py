"""Builds the Kubernetes objects of a job, with pure functions of its spec."""
