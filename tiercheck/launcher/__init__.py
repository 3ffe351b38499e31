"""PID 1 of the trainer container: runs the user's command once every rank is ready."""
