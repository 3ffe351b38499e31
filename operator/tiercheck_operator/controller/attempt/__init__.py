"""An attempt: begun, restored, released, and told to every sidecar."""
