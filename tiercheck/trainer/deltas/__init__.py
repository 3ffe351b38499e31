"""Records the inputs of each update, and checks that a delta of them is exact."""
