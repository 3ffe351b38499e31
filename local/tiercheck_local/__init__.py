"""A laptop cluster: a control plane, nodes and pods as plain processes, and the faults that hit them.

A stand-in for development, tests and the demo. Production is any Kubernetes >= 1.33.
"""
