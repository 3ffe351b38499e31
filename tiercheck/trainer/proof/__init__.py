"""That a version is what the state was, and that a replay gives the very bits."""
