"""Sends own ranks' artifacts to this worker's holders."""
