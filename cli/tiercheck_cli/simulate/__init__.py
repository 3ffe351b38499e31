"""Implements `tiercheck simulate`: months of failures, played with the operator's own planning."""
