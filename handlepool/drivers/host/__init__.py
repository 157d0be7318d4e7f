"""A driver without a GPU: NumPy arrays on simulated devices, streams, events and captures."""
