"""A bucket as remote tier: obstore moves the bytes, boto3 does the rest."""
