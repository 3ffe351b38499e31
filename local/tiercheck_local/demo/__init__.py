"""Demonstrates one job under failures of every size, with the same loss curve.

`job.py` has the story, which `__main__.py` runs; `record.py` and `report.py` record and show it.
"""
