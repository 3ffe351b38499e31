"""What the API server keeps, and what may be done to it."""
