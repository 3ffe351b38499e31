"""Plans parity groups: whose artifacts are coded together, and who keeps the blocks."""
