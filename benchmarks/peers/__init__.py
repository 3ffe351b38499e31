"""Others who do the same work: each in an environment of its own, all driven by one loop, so that figures
compare."""
