"""Runs the controllers that a job needs: scheduling, nodes, budgets, garbage collection."""
