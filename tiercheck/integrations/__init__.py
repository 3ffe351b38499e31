"""A framework that owns the training loop is made to call Checkpointer at the right places: one module for
each of them."""
