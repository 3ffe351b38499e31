"""An interpreter that has torch already and waits to become the training command, exactly as if it had just
been started."""

IDLE_NAME = "tiercheck-warm"
"""What `ps` and `top` call such a process (its `comm`) until it has become the command."""
