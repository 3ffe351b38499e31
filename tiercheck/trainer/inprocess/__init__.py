"""In-process recovery: a rank that is lost is replaced, and every other process keeps running."""
