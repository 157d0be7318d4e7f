"""The two drivers, and which of them is chosen."""
