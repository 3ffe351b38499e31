"""The testbed is a real Kubernetes of several nodes on one machine.

Kubelets and containerd are real, and each node has namespaces of its own.
"""
