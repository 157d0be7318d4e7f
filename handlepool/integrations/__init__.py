"""Connect other libraries to handlepool.

Each module uses public names only, and is imported only on request.
"""
