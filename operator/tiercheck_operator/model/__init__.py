"""Defines the data types that all packages of the operator share. It imports none of these packages."""
