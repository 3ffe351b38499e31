"""Which versions are complete where, and what may be given up."""
