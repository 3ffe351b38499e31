"""Holds what all other parts of the sidecar share; it imports none of them."""
