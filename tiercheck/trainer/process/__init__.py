"""What a training process says of itself."""
