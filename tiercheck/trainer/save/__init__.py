"""A state on its way into slots."""
