"""Which of a pod's networks the exchange uses, and what carries its bytes there."""
