"""Serve other libraries beyond their arrays' protocols.

Each module is imported with the first array of its library, not before.
"""
