"""What the package has measured of functions, for tests: nothing yet, all that was asked for, or never anything."""

from handlepool.order import measured, plain_calls


def forget():
    """Know nothing of plain functions, as in a new process."""
    measured.functions.clear()
    plain_calls._may_write.clear()


def settle(scene):
    """Have the answers of all measurements so far read."""
    scene.driver.synchronize_stream(scene.stream.ptr)
    measured.wait_for_answers()


def never(monkeypatch):
    """Take every function to write as declared, without a measurement."""
    begin = measured.Writes.__init__

    def known(writes, *args, **options):
        begin(writes, *args, **options)
        writes.known, writes.calls = True, measured.LAST

    monkeypatch.setattr(measured.Writes, "__init__", known)
    # Of operations that other tests have called.
    monkeypatch.setattr(measured.Writes, "due", False)
    monkeypatch.setattr(measured.Writes, "settled", True)
