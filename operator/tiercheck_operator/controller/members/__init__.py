"""Who belongs to the job: workers, spares, the suspected, the lost and those that leave."""
