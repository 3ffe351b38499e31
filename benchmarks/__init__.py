"""Measures what TierCheck costs and how fast it is, beside the physical limit and beside others.

python -m benchmarks [--quick] [--only NAME ...]
"""
