"""Determines a job's workers and spares, and the pods that are suspected, lost or leaving."""
