"""Parallel regions: forks, their branches and their memory; tasks."""
