"""The words that the trainer, the sidecar and the operator exchange.

Frozen dataclasses and their encoding, nothing else: this package imports the standard library only, so that
it can be copied into any training image, and it never does I/O, so that every rule in it can be tested as
arithmetic.
"""
