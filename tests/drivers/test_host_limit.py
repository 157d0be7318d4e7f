"""How much memory a simulated device has is a setting, and the errors of too little say so."""

import pytest

from handlepool import ArgumentError, HandlePool, OutOfMemoryError
from handlepool.cli import info
from handlepool.drivers.host import limit
from handlepool.drivers.host.driver import HostDriver


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4K", 4096), ("4G", 4 << 30), ("1.5 GiB", 3 << 29), (" 2mb ", 2 << 20), ("1T", 1 << 40), ("0", 0)],
)
def test_a_size_is_a_number_with_or_without_a_unit(monkeypatch, text, nbytes):
    monkeypatch.setenv("HANDLEPOOL_HOST_MEMORY", text)
    assert limit.limit() == (nbytes, "set by HANDLEPOOL_HOST_MEMORY")
    assert HostDriver().memory_info() == (nbytes, nbytes)


@pytest.mark.parametrize("text", ["4X", "-1", "all", "4 4", "G", "1e9", "0x10"])
def test_what_is_no_size_is_refused_by_its_name_where_a_driver_is_made(monkeypatch, text):
    monkeypatch.setenv("HANDLEPOOL_HOST_MEMORY", text)
    with pytest.raises(ArgumentError, match=r"^HANDLEPOOL_HOST_MEMORY='.*' is no size: .* for example 4G$"):
        HostDriver()
    assert HostDriver(memory=512).memory_info() == (512, 512)
    assert "HANDLEPOOL_HOST_MEMORY" in info.collect()["host_memory"]["problem"]


def test_the_default_is_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(limit, "_free", lambda: 6 << 30)
    assert HostDriver().memory_info() == (3 << 30, 3 << 30)
    assert info.host_memory() == {"bytes": 3 << 30, "reason": "1/2 of the free memory; HANDLEPOOL_HOST_MEMORY is not set"}


def test_a_machine_that_does_not_say_what_is_free_has_a_fixed_default(monkeypatch):
    monkeypatch.setattr(limit, "_free", lambda: None)
    assert limit.limit()[0] == limit.UNKNOWN


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4096 kB\n"}

    def path(name):
        file = tmp_path / name.strip("/").replace("/", "-")
        if name in files:
            file.write_text(files[name])
        return file

    monkeypatch.setattr(limit, "Path", path)
    assert limit.limit()[0] == 2 << 20
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "1048576\n"}
    assert limit.limit()[0] == 2 << 20
    files["/sys/fs/cgroup/memory.max"] = "2097152\n"
    assert limit.limit()[0] == 1 << 19


def test_scratch_that_does_not_fit_says_that_the_memory_is_simulated_and_how_to_have_more():
    advice = r"the memory is simulated: set the size per device by HANDLEPOOL_HOST_MEMORY, for example HANDLEPOOL_HOST_MEMORY=4G"
    with HandlePool(driver=HostDriver(memory=4096)) as pool, pytest.raises(OutOfMemoryError, match=advice):
        pool.get_workspace(8192)
