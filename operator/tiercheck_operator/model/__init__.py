"""What every room of the operator knows by name. It imports none of them."""
