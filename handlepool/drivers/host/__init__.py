"""A driver without a GPU: NumPy arrays on simulated devices.

The driver has streams, events and captures, like a GPU.
"""
