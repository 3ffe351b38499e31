"""A Kubernetes API server small enough to start in a blink, so that tests and the demo need no cluster.

It keeps everything in memory and serves a subset of the API. What it serves behaves as the real server does; the
suite in tests/local/conformance runs on both and holds it to that.
"""
