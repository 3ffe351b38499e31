"""Places copies and parity, at the start and during training, and limits evictions."""
