"""Begins an attempt, waits until it is restored, releases it, and builds every sidecar's directive."""
