"""Plans a recovery: which version, and from where for each rank."""
