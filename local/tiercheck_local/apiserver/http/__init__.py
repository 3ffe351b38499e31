"""What a client of the API server meets: paths, verbs, discovery, watches and the forms of answers."""
