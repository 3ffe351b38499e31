"""Plans copies: which workers keep those of which others."""
