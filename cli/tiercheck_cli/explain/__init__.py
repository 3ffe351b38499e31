"""Implements `tiercheck explain`: the reasons of the last recovery, and a forecast of the next one."""
