"""The demonstration: one job, every size of failure, the same loss curve.

`scenario.py` tells the story top-down; everything else here is what it needs to be told.
"""
