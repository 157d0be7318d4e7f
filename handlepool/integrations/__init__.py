"""Connect other libraries to handlepool.

Each module uses only public names of handlepool, and is imported only if user code imports it.
"""
