"""What many workers, and many jobs, cost the operator: pushes, listening, memory."""
