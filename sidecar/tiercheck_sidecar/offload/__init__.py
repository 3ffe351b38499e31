"""Offload: versions go to the remote tier, what lies there is known, and a restore reads from there."""
