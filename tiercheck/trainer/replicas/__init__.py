"""Shares, compares and reassembles state that several ranks hold equally."""
