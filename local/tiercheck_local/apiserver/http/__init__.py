"""Serves the API to clients: paths, verbs, discovery, watches and the forms of answers."""
