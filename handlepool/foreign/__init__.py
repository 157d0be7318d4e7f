"""Support other libraries beyond the protocols of their arrays.

Each module is imported when handlepool is given the first array of the module's library.
"""
