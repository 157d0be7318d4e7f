"""The examples of docs/graphs.md run, in order, on the host driver."""

import re
from pathlib import Path

import pytest
from arrays import Arrays

from handlepool import HandlePool, reference

PAGE = Path(__file__).parent.parent / "docs" / "graphs.md"


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not here")
def test_the_examples_run(make_driver, monkeypatch, capsys):
    with HandlePool(driver=make_driver()) as pool:
        monkeypatch.setattr("handlepool.defaults._default", pool)
        arrays = Arrays(pool)
        names = {"x": arrays.random(2, 16, 14, 14), "w": arrays.random(8, 16, 3, 3)}
        expected = reference.conv2d(arrays.take(names["x"]), arrays.take(names["w"]), padding=1, activation="relu")
        blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for block in blocks:
            exec(block, names)
            if "result" in block:
                names["y"] = names["result"]
            assert arrays.error(names["y"], expected) < 1e-5
    assert len(blocks) == 5
    assert "host_im2col" in capsys.readouterr().out
