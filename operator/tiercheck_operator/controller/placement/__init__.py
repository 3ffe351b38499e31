"""Who keeps whose copies, now and while the job trains; and who may be evicted."""
