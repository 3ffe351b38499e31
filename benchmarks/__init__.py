"""What TierCheck costs and how fast it is, beside the physical limit and beside others, measured by the
repository's own command.

python -m benchmarks [--quick] [--only NAME ...]
"""
