"""Stores the API server's objects, and reads, changes and selects them."""
