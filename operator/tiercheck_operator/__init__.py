"""The operator: keeps TierCheckJobs running by deciding, never by carrying their data."""
