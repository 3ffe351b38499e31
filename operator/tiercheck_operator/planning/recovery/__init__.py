"""Plans a recovery: the version, and the sources of each rank."""
