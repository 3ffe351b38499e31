"""What failed, whose fault it is, and what follows from it."""
