"""Record the function of a spread's items, or run it eagerly."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from handlepool._util.cleanup import do_all
from handlepool._util.frames import frames_inside
from handlepool._util.reachable import leaves
from handlepool.drivers.protocol import Driver
from handlepool.pool.default import current_pool
from handlepool.pool.internals import PoolInternals
from handlepool.recording.instances import Instance
from handlepool.recording.keys import Call
from handlepool.recording.recorded import RecordedFunction
from handlepool.recording.sharing import rebuilt
from handlepool.recording.variants import Options, Variant
from handlepool.spreading.items import itself

MOST_PROGRAMS = 8
"""The maximum number of programs of a device.

A further program closes the least recently used program.
"""


class Eager:
    """Track whether items of a spread run eagerly, and warn once.

    Attributes
    ----------
    always : bool
        Whether all further items run eagerly, because the function cannot be recorded.
    """

    def __init__(self, name: str) -> None:
        self.always = False
        self._name = name
        self._said = False

    def stop_recording(self, why: str) -> None:
        """Let all further items run eagerly, and warn of the reason."""
        self.always = True
        self.say(why)

    def say(self, why: str) -> None:
        """Warn, at the first call only, that items run eagerly."""
        if not self._said:
            self._said = True
            what = "all items run" if self.always else "some items run"
            text = f"spread({self._name}): {what} eagerly, which is slower on several devices, because they cannot be recorded"
            warnings.warn(f"{text}: {why}", RuntimeWarning, stacklevel=frames_inside())


class ItemFunction(RecordedFunction[..., Any]):
    """The function of a spread, recorded on one device.

    The outputs of a call are valid until the next call.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], shared: Sequence[Any], driver: Driver, lanes: int | None, eager: Eager
    ) -> None:
        def call(item: object) -> Any:
            # The function may change the lists and dictionaries of its item, so each call gets copies of them.
            return function(rebuilt(item, itself), *shared)

        call.__qualname__ = name
        fixed = [each for each in leaves(shared) if isinstance(each, driver.array_types)]
        options = Options(call, name, lanes, 1, MOST_PROGRAMS, True, False, frozenset(), function, fixed, private=True)
        super().__init__(options)
        self._spread_eager = eager

    def served_by(self, item: object) -> tuple[Variant, Instance] | None:
        """Return the variant and the instance that serve an item.

        Return None if the function has no program for such an item yet.
        """
        reader, pool = self._reader, current_pool()
        if reader is None or reader.driver is not pool.driver:
            return None
        call = reader.read((item,), {})
        for variant in self._table.by_key.get(call.key, ()):
            if variant.pool is pool and variant.instances and variant.takes(call):
                return variant, variant.instances[0]
        return None

    def keeps(self, variant: Variant) -> bool:
        """Return whether the variant has not been dropped."""
        return variant in self._table

    def close(self) -> None:
        """Close all programs, after their last work, and forget them."""
        try:
            do_all([each.close for variant in self._table for each in variant.instances])
        finally:
            self.clear()

    def _may_record(self, pool: PoolInternals, call: Call) -> bool:
        """Return True: each geometry is recorded at its first item."""
        return True

    def _say(self, why: str, cause: BaseException | None = None) -> None:
        """Let all further items run eagerly, on all devices."""
        self._spread_eager.stop_recording(why)
