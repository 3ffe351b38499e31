"""What every room of the sidecar knows; it imports none of them."""
