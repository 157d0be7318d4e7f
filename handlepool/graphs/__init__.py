"""Graph functions: from a Python function to a plan that is launched."""
