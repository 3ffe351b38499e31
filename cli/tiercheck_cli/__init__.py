"""`tiercheck`, the command for people: demonstrate, plan, explain, report."""
