"""What runs inside the training process: it saves the state while training goes on, and puts it back bit for
bit."""
