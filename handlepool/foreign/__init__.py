"""Support other libraries beyond the protocols of their arrays.

Each module is imported when the first array of its library is used.
"""
