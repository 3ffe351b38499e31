"""The trainer's part saves the state while training goes on, and puts it back bit for bit."""
