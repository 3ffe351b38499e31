"""Simulates a node: one process that runs its pods' containers as processes of the host.

A container's view of its own file system is imitated by rewriting paths (`PathTranslation`): there are no
mount namespaces.
"""
