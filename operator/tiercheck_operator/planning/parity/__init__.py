"""Plans parity groups: which workers' artifacts are coded together, and which workers hold the blocks."""
