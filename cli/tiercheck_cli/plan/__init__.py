"""Implements `tiercheck plan`: which workers hold which copies."""
