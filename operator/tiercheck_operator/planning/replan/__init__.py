"""Plans which copies move while a job trains, and in which order."""
