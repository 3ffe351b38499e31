"""Rehearsal: while the job trains, what a recovery would read is read by the recovery's own functions, and
every byte is verified."""
