"""A driver without a GPU: NumPy arrays on simulated devices.

It has streams, events and captures.
"""
