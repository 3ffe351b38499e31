"""PID 1 of the trainer container: the user's command runs when every rank is ready, and only then."""
