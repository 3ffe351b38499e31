"""Runs a warm interpreter, which has imported torch and becomes the training command."""

IDLE_NAME = "tiercheck-warm"
"""The name (`comm`) that `ps` and `top` show for such a process until it has become the command."""
