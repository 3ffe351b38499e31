"""Integrations make frameworks that own the loop call Checkpointer at the right places."""
