"""`tiercheck plan`: who keeps whose copies."""
