"""What cuDNN has plans for on this GPU is what it said it has for a described one."""

import pytest
from planning.table import families, golden, lines, supported

pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed", exc_type=ImportError)


@pytest.fixture
def table():
    """The table of this cuDNN."""
    number = cudnn.backend_version()
    found = golden(f"{number // 10000}.{number // 100 % 100}")
    if found is None:
        pytest.skip(f"needs an NVIDIA GPU with a cuDNN that there is a table of, not {number}")
    return found


@pytest.fixture
def complete(table):
    """Whether all engines are in the table: 9.19 asks a GPU itself what some need, so what is missing may be there."""
    return table["cudnn"] >= 92800


def test_every_call_has_plans_where_the_table_has_some(pool, stream, table, complete, monkeypatch):
    from handlepool.drivers.cuda.executable import CudaExecutable

    launched, launch = [], CudaExecutable.launch

    def noted(executable, *rest):
        launched.append(executable)
        launch(executable, *rest)

    monkeypatch.setattr(CudaExecutable, "launch", noted)
    monkeypatch.setattr(CudaExecutable, "shortcut", lambda *_: None)
    told = []
    for group, found in lines(pool, launched).items():
        for name, line in found.items():
            here, there = supported(line), supported(table[group][name])
            if here < there or (complete and here > there):
                told.append((group, name, line))
    assert told == []


@pytest.mark.parametrize("kind", ["raw", "ruled"])  # which processes share
def test_g18_every_case_has_plans_where_the_table_has_some(pool, table, complete, kind):
    handle = pool.driver.create_handle()
    try:
        told = []
        for family, counts in families({"handle": handle}, [kind])[kind].items():
            here, there = counts.get("planned", 0) + counts.get("not compiled", 0), table[kind][family].get("planned", 0)
            if here < there or (complete and here > there) or (kind == "ruled" and "not compiled" in counts):
                told.append((family, counts))
        assert told == []
    finally:
        pool.driver.destroy_handle(handle)
