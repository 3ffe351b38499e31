"""`tiercheck explain`: why the last recovery took what it took, and what the next one would."""
