"""`tiercheck events`: what happened to a job, and its recoveries."""
