"""What each update consumed, and whether a delta of it is exact."""
