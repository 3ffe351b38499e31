"""A warm interpreter has torch already and becomes the training command as if just started."""

IDLE_NAME = "tiercheck-warm"
"""What `ps` and `top` call such a process (its `comm`) until it has become the command."""
