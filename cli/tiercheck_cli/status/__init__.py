"""`tiercheck status`: how jobs are, and what to do."""
