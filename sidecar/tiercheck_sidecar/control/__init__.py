"""What the operator asks and hears: the control API, reports, metrics."""
