"""Versions of the training state outside a job: written for other tools, and made from what other
tools wrote."""
