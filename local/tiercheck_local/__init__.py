"""Runs a laptop cluster: control plane, nodes and pods as plain processes, and faults that hit them.

It replaces a cluster in development, tests and the demo. Production is any Kubernetes >= 1.33.
"""
