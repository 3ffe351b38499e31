"""Defines the messages that the trainer, the sidecar and the operator exchange.

The package consists of frozen dataclasses and their encoding. It imports only the standard library, so that
it can be copied into any training image, and does no I/O, so that every rule can be tested as pure functions.
"""
