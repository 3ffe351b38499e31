"""The pod's own trainer: its launcher's orders, its ranks' slots."""
