"""Plans copies: which workers hold the copies of which others."""
