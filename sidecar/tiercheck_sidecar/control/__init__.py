"""Serves the operator: the control API, reports and metrics."""
