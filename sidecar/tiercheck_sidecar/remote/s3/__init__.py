"""Keeps the remote tier in a bucket: obstore uploads artifacts, boto3 does the rest."""
