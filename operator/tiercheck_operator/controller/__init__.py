"""Observe, decide, execute: one level-based reconcile per job."""
