"""A simulated node: one process that runs its pods' containers as processes of the host.

What a container would see of its own file system is imitated by rewriting paths (`paths.py`): there are no
mount namespaces.
"""
