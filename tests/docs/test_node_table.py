"""The table of nodes is what the code says."""

import pytest
from node_table import PATH, generate


@pytest.mark.skipif(not PATH.exists(), reason="docs/ is not here")
def test_the_table_of_nodes_is_generated():
    assert PATH.read_text(encoding="utf-8") == generate(), "run: PYTHONPATH=. python tests/node_table.py"
