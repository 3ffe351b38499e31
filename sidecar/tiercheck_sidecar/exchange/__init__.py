"""Bulk transfer between sidecars: plain TCP in threads, from slot to slot, verified before it is
acknowledged."""
