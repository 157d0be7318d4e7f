"""What is logged, at DEBUG, off the hot path."""

import logging


def texts(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "handlepool"]


def test_creates_reuse_growth_and_trims_are_logged(make_pool, in_thread, caplog):
    caplog.set_level(logging.DEBUG, logger="handlepool")
    pool = make_pool()
    in_thread(pool.get_workspace, 100)
    pool.get_workspace(1000)
    pool.trim()
    said = "\n".join(texts(caplog))
    for part in (
        "handle created in",
        "new handle bound to stream 0x0",
        "256 bytes of scratch allocated, 256 in all",
        "reused handle bound to stream 0x0",
        "bytes of scratch freed",
        "trimmed: ",
    ):
        assert part in said, part


def test_a_hit_logs_nothing(make_pool, caplog):
    caplog.set_level(logging.DEBUG, logger="handlepool")
    pool = make_pool()
    pool.get_workspace(100)
    caplog.clear()
    pool.get_handle()
    pool.get_workspace(100)
    assert texts(caplog) == []


def test_nothing_is_printed_where_nobody_asked(make_pool, capfd):
    pool = make_pool()
    pool.get_workspace(100)
    pool.trim()
    assert capfd.readouterr() == ("", "")
