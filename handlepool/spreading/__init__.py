"""Spread work over several devices of one process."""
