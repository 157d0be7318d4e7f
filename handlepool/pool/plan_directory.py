"""Keep built plans in a directory, for this process and later processes.

The directory belongs to one user. Each file starts with a digest, which reveals damage. A reader checks the digest before it
uses the contents. The digest does not protect against attackers: a plan contains kernels, so every writer of the directory is
trusted. An unusable file is ignored, and is replaced once the plan has been built. No lock is held. A file is written under
another name and then renamed. So a reader finds the whole file or no file, even if the writer is killed.
"""

import json
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from errno import EEXIST, ENOTDIR
from hashlib import sha256
from pathlib import Path

from handlepool._util.names import shown
from handlepool.drivers.executable import SavedPlan
from handlepool.errors import ArgumentError

VARIABLE = "HANDLEPOOL_PLAN_DIRECTORY"
MOST_BYTES = 512 * 2**20
"""The maximum number of bytes of all files of a directory.

The least recently used files are removed first.
"""
MOST_OF_ONE = 64 * 2**20
"""The maximum number of bytes of one file."""
_FIRST = b"handlepool plan 1\n"
_LENGTH = struct.Struct("<I")
_ENDING = ".plan"
_UNFINISHED = ".part"
_PLANS = re.compile(r"[0-9a-f]{40}\.plan")
_PARTS = re.compile(r"[0-9a-f]{16}\.part")
"""The names of unfinished files.

This module reads and removes only files whose names match `_PLANS` or `_PARTS`.
"""
_STALE = 3600.0
"""The age in seconds from which an unfinished file is removed.

The process that wrote an older file was probably killed.
"""
_DIGEST = sha256().digest_size
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The name, the size and the contents of one plan file.

    Attributes
    ----------
    name : str
    nbytes : int
    used : float
        Time of its last use, in seconds since 1970.
    key : str or None
        The key of the plan; None if the file is unusable.
    plan : SavedPlan or None
    """

    name: str
    nbytes: int
    used: float
    key: str | None
    plan: SavedPlan | None


class PlanDirectory:
    """Plans in files, each under the digest of its key.

    Parameters
    ----------
    path : str or path
        Path of the directory. A missing directory is made, for this user alone. A relative path is resolved at once, so a later
        change of the working directory has no effect.
    most : int
        The maximum number of bytes of all files.

    Raises
    ------
    ArgumentError
        For an object that is no path, and for a path that is no directory. Also for a symbolic link, and for a directory that
        other users may write to.
    """

    def __init__(self, path: str | os.PathLike[str], most: int = MOST_BYTES) -> None:
        self.path = absolute(path)
        self._most = most
        # This counts the bytes written since the directory's size was last measured. None means that it was not yet measured.
        self._written: int | None = None
        self._counts: Counter[str] = Counter()
        # The lock guards the counts. No code under the lock can block.
        self._lock = threading.RLock()
        try:
            for path in (*reversed(self.path.parents), self.path):
                path.mkdir(0o700, exist_ok=True)
            os.close(self._open())
        except OSError as error:
            why = error.strerror or error
            if error.errno in (EEXIST, ENOTDIR):
                it = "it" if path == self.path else path
                why = f"{it} is {'a symbolic link to no directory' if Path(path).is_symlink() else 'a file'}"
            raise ArgumentError(
                f"plan directory {shown(str(self.path))} cannot be used: {why}; pass another directory"
            ) from error

    def load(self, key: str) -> SavedPlan | None:
        """Return the plan saved under a key.

        Return None if there is no usable file.
        """
        try:
            directory = self._open()
        except (OSError, ArgumentError):
            self._count("plan_files_missed")
            return None
        try:
            data = _read(_name(key), directory)
        except OSError:
            self._count("plan_files_missed")
            return None
        finally:
            os.close(directory)
        found = _decoded(data)
        if found is None or found[0] != key:
            self._count("plan_files_rejected")
            return None
        self._count("plan_files_loaded")
        return found[1]

    def reject(self, key: str) -> None:
        """Count a loaded plan as unusable, and remove its file."""
        self._count("plan_files_rejected")
        try:
            directory = self._open()
        except (OSError, ArgumentError):
            return
        try:
            os.unlink(_name(key), dir_fd=directory)
        except OSError:
            pass
        finally:
            os.close(directory)

    def save(self, key: str, plan: SavedPlan) -> None:
        """Save a plan, if possible.

        A full or read-only directory is no error. A later process then builds the plan again.
        """
        data = _encoded(key, plan)
        if len(data) > min(MOST_OF_ONE, self._most):
            return
        try:
            directory = self._open()
        except (OSError, ArgumentError):
            self._count("plan_files_unwritten")
            return
        try:
            _write(_name(key), data, directory)
            self._count("plan_files_written")
            self._bound(directory, len(data))
        except OSError:
            self._count("plan_files_unwritten")
        finally:
            os.close(directory)

    def files(self) -> Iterator[PlanFile]:
        """Yield the plan files, the most recently used first.

        An unusable file has neither key nor plan.

        Raises
        ------
        OSError, ArgumentError
            Where the directory cannot be read.
        """
        directory = self._open()
        try:
            for used, name, nbytes in sorted(_listed(directory, _PLANS), reverse=True):
                try:
                    found = _decoded(_read(name, directory, touch=False))
                except OSError:
                    found = None
                good = found is not None and _name(found[0]) == name
                yield PlanFile(name, nbytes, used, *(found if found is not None and good else (None, None)))
        finally:
            os.close(directory)

    def clear(self) -> int:
        """Remove all plan files; return their number.

        Raises
        ------
        OSError, ArgumentError
            Where a file cannot be removed.
        """
        directory = self._open()
        try:
            names = [name for ours in (_PLANS, _PARTS) for _, name, _ in _listed(directory, ours)]
            for name in names:
                _remove(name, directory)
            return len(names)
        finally:
            os.close(directory)

    def counts(self) -> dict[str, int]:
        """Return the counters by the names of `HandlePool.stats`."""
        with self._lock:
            return dict(self._counts)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _open(self) -> int:
        """Open the directory, check its owner and mode, and return its descriptor.

        Files are then opened relative to the descriptor. If each file were opened by its path, another user could replace the
        directory after the check.
        """
        try:
            directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if self.path.is_symlink():
                raise ArgumentError(f"plan directory {self.path} is a symbolic link; pass the directory itself") from error
            raise
        found = os.fstat(directory)
        why = ""
        if found.st_uid not in (os.geteuid(), 0):
            why = "belongs to another user"
        elif found.st_mode & _OTHERS_WRITE:
            why = f"is writable by other users (mode {stat.S_IMODE(found.st_mode):o})"
        if why:
            os.close(directory)
            raise ArgumentError(
                f"plan directory {self.path} {why}, so another user may put plans there; "
                f"pass a directory of your own with mode 700"
            )
        return directory

    def _bound(self, directory: int, written: int) -> None:
        """Remove the least recently used files of an oversized directory.

        The size is measured at the first write of a process, and again whenever the process has written a sixteenth of the
        bound.
        """
        with self._lock:
            due = self._written is None or self._written + written > self._most // 16
            self._written = 0 if due else (self._written or 0) + written
        if not due:
            return
        for changed, name, _ in _listed(directory, _PARTS):
            # The absolute difference also covers a clock that was set back meanwhile.
            if abs(time.time() - changed) > _STALE:
                _remove(name, directory)
        files = sorted(_listed(directory, _PLANS))
        total = sum(nbytes for _, _, nbytes in files)
        for _, name, nbytes in files:
            if total <= self._most - self._most // 16:
                break
            _remove(name, directory)
            total -= nbytes


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory."""
    text = path if isinstance(path, str) else os.fspath(path) if isinstance(path, os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text or not _encodable(text):
        raise ArgumentError(f"plan_directory={shown(path)} is no path; pass the path of a directory, as text or a pathlib.Path")
    try:
        return Path(text).expanduser().absolute()
    # The user's home may be unknown, or the working directory may have been removed.
    except (RuntimeError, OSError) as error:
        raise ArgumentError(f"plan_directory={shown(text)} cannot be found: {error}; pass an absolute path") from error


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    # Half of a surrogate pair cannot be encoded, so no file can have such a path.
    except UnicodeEncodeError:
        return False
    return True


def _name(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:40] + _ENDING


def _encoded(key: str, plan: SavedPlan) -> bytes:
    told = {"engine": plan.engine, "workspace_size": plan.workspace_size, "candidates": plan.candidates, "early": plan.early}
    head = {"key": key, **told}
    text = json.dumps(head).encode()
    rest = _LENGTH.pack(len(text)) + text + plan.data
    return _FIRST + sha256(rest).digest() + rest


def _decoded(data: bytes) -> tuple[str, SavedPlan] | None:
    """Return the key and plan of a file, or None.

    None means that the file is damaged or from another program.
    """
    start = len(_FIRST) + _DIGEST
    rest = memoryview(data)[start:]
    if not data.startswith(_FIRST) or len(rest) < _LENGTH.size or sha256(rest).digest() != data[len(_FIRST) : start]:
        return None
    (length,) = _LENGTH.unpack_from(rest)
    # Even with a right digest, another program may have written contents of another form.
    try:
        head = json.loads(str(rest[_LENGTH.size : _LENGTH.size + length], "ascii"))
        names = "key", "engine", "workspace_size", "candidates", "early"
        key, engine, workspace_size, candidates, early = (head[name] for name in names)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = all(type(number) is int and 0 <= number < 1 << 62 for number in (workspace_size, candidates))
    texts = all(isinstance(text, str) and text.isascii() and text.isprintable() for text in (key, engine))
    if not (numbers and texts and (early is None or type(early) is bool)):
        return None
    return key, SavedPlan(engine, workspace_size, candidates, bytes(rest[_LENGTH.size + length :]), early)


def _read(name: str, directory: int, *, touch: bool = True) -> bytes:
    """Return the bytes of a file, and note its use.

    The result is empty if the file is not a regular file, is too large, or can be written by other users.
    """
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        found = os.fstat(file)
        ours = found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE
        if not stat.S_ISREG(found.st_mode) or not ours or found.st_size > MOST_OF_ONE:
            return b""
        if touch:
            try:
                os.utime(file)
            # The time of use cannot be noted in a directory that belongs to root, or that is read-only.
            except OSError:
                pass
        # On Linux, one call reads up to 2 GiB, so the whole file. A shorter result would fail the digest check.
        return os.read(file, found.st_size)
    finally:
        os.close(file)


def _write(name: str, data: bytes, directory: int) -> None:
    unfinished = f"{secrets.token_hex(8)}{_UNFINISHED}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(unfinished, flags, 0o600, dir_fd=directory), "wb") as stream:
            stream.write(data)
        os.replace(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        _remove(unfinished, directory)
        raise


def _remove(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    # Another process has removed the file already.
    except FileNotFoundError:
        pass


def _listed(directory: int, names: re.Pattern[str]) -> list[tuple[float, str, int]]:
    """Return last use, name and size of each matching file."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if names.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                try:
                    known = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append((known.st_mtime, entry.name, known.st_size))
    return found
