"""What objects must look like: built-in kinds, CRDs, their schemas and rules."""
