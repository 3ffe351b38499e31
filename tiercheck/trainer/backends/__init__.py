"""Hands artifacts to the sidecar in a cluster, and writes them to a folder elsewhere."""
