"""What the status and the Events say."""
