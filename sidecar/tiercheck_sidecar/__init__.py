"""Keeps a worker's checkpoints in memory and copies them to peers and the remote tier."""
