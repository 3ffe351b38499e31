"""Where artifacts go: to the sidecar in a cluster, to a folder elsewhere."""
