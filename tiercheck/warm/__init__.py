"""An interpreter that has torch already and waits to become the training command, exactly as if it had just been started."""
