"""What a job owns in the cluster, as pure functions from its spec to Kubernetes objects."""
