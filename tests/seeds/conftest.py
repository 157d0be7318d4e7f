"""Fixtures of the documents' workloads: each runs on the host driver, and marked `gpu` on a GPU."""

import pytest


@pytest.fixture
def pool(each_pool):
    """A pool on each driver in turn; see `each_pool`."""
    return each_pool
