"""The sidecar: keeps a worker's checkpoints in memory, copies them to other workers and to the remote
tier.
"""
