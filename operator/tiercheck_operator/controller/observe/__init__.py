"""What one look shows, and what follows from it."""
