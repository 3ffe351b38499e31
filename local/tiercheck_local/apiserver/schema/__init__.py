"""Validates objects: built-in kinds, CRDs, their schemas and rules."""
