"""Implements `tiercheck`, the command for users: demonstrate, plan, explain, report."""
