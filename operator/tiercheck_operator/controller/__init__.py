"""Observes, decides and executes: one level-based reconcile per job."""
