"""A real Kubernetes of several nodes on one machine: real kubelets and containerd, each node in namespaces of
its own."""
