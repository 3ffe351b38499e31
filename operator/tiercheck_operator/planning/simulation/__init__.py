"""Plays jobs' lives with the planner's own decisions."""
