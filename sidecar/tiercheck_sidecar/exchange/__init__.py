"""Moves bulk data between sidecars: plain TCP, from slot to slot, verified before acknowledged."""
