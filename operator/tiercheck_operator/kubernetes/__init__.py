"""Talks to the API server: calls, watches, Events, owned objects and the Lease."""
