"""Elects by a Lease the one replica that acts, so that a lost one is replaced in seconds."""
