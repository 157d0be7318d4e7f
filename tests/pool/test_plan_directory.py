"""The plan directory: what it gives back is what was put there, or nothing."""

import errno
import hashlib
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from handlepool import ArgumentError, HandlePool
from handlepool.drivers.executable import SavedPlan
from handlepool.pool import plan_directory
from handlepool.pool.plan_directory import PlanDirectory

PLAN = SavedPlan("eng22_k2=5", 4096, 43, bytes(range(256)) * 12, True)


@pytest.fixture
def files(tmp_path):
    return PlanDirectory(tmp_path / "plans")


def only_file(files):
    (path,) = files.path.iterdir()
    return path


def test_a_plan_comes_back_as_it_was_in_another_process_too(files):
    assert files.load("a graph") is None
    files.save("a graph", PLAN)
    assert PlanDirectory(files.path).load("a graph") == PLAN
    assert files.load("another graph") is None
    assert files.counts() == {"plan_files_missed": 2, "plan_files_written": 1}


def test_a_relative_path_stays_what_it_was_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "plans").mkdir(0o700, parents=True)
    monkeypatch.chdir(tmp_path)
    files = PlanDirectory("plans")
    monkeypatch.chdir("elsewhere")
    files.save("a graph", PLAN)
    assert files.load("a graph") == PLAN
    assert [path.parent for path in tmp_path.rglob("*.plan")] == [tmp_path / "plans"]


@pytest.mark.parametrize("path", ["", b"plans", 3, True, "pl\0ans", "pl\ud800ans", ["plans"]])
def test_what_is_no_path_is_an_error_of_the_argument(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"plan_directory=.*; pass the path of a directory"):
        HandlePool(driver="host", plan_directory=path)
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_nobody_knows_and_a_file_are_errors_of_the_argument(tmp_path):
    with pytest.raises(ArgumentError, match=r"home directory.*; pass an absolute path"):
        PlanDirectory("~nobody-is-called-so/plans")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name, why in (
        ("file", "it is a file"),
        ("file/plans", ".*/file is a file"),
        ("link", "it is a symbolic link to no directory"),
    ):
        with pytest.raises(ArgumentError, match=f"cannot be used: {why}; pass another directory"):
            PlanDirectory(tmp_path / name)
    assert not (tmp_path / "none").exists()


def test_what_is_made_is_for_this_user_alone(files):
    files.save("a graph", PLAN)
    assert files.path.stat().st_mode & 0o777 == 0o700
    assert only_file(files).stat().st_mode & 0o777 == 0o600


def test_what_is_made_above_is_for_this_user_alone_and_what_was_there_stays(tmp_path):
    (tmp_path / "there").mkdir(0o755)
    path = PlanDirectory(tmp_path / "there" / "made" / "too" / "plans").path
    assert [folder.stat().st_mode & 0o777 for folder in (path, *path.parents[:3])] == [0o700] * 3 + [0o755]


def mutations(good, other, seed):
    """Endless variants of a file: bits and bytes changed, parts cut, doubled or taken from another file."""
    chance = random.Random(seed)
    first = len(b"handlepool plan 1\n")
    while True:
        data, place = bytearray(good), chance.randrange(len(good))
        kind = chance.randrange(7)
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            del data[place : place + chance.randrange(1, 40)]
        elif kind == 3:
            data[place:place] = data[place : place + chance.randrange(1, 40)]
        elif kind == 4:  # the head of another plan, or its digest
            end = chance.choice([first, first + 32, first + 32 + 4, first + 60])
            data[:end] = other[:end]
        elif kind == 5:  # another version
            data[first - 2] = chance.choice(b"023456789")
        else:  # a digest that is right, over a head of another plan or none
            (length,) = struct.unpack_from("<I", good, first + 32)
            head, rest = good[first + 36 : first + 36 + length], good[first + 36 + length :]
            wrong = [b"[]", b"{}", b"null", b"[" * 5000, head[: chance.randrange(length)], head.replace(b"a graph", b"b graph")]
            wrong += [head.replace(old, b"\\ud800") for old in (b"a graph", b"eng22")]
            wrong += [head.replace(b"4096", number) for number in (b"-1", b"4096.0", b'"4096"', b"1" + b"0" * 30, b"true")]
            head = chance.choice(wrong)
            body = struct.pack("<I", chance.choice([len(head), 0, 1 << 31])) + head + rest
            data[first:] = hashlib.sha256(body).digest() + body
        if data != good:
            yield bytes(data)


def test_ten_thousand_damaged_files_are_all_passed_over(files):
    files.save("a graph", PLAN)
    good = only_file(files)
    name, data = good, good.read_bytes()
    files.save("another graph", SavedPlan("eng1", 0, 1, b"other" * 600))
    other = next(path for path in files.path.iterdir() if path != good).read_bytes()
    for mutated, number in zip(mutations(data, other, 20261123), range(10_000), strict=False):
        found = plan_directory._decoded(mutated)
        assert found is None or found[0] != "a graph", mutated
        if number % 10 == 0:
            name.write_bytes(mutated)
            assert files.load("a graph") is None, mutated
    assert files.counts()["plan_files_rejected"] == 1_000
    name.write_bytes(data)
    assert files.load("a graph") == PLAN


def test_control_behind_a_digest_of_its_own_another_plan_is_taken(files):
    files.save("a graph", PLAN)
    path = only_file(files)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    assert files.load("a graph") is None
    path.write_bytes(data[:18] + hashlib.sha256(data[50:]).digest() + data[50:])
    assert files.load("a graph") is not None


def test_a_file_under_another_plans_name_is_passed_over(files):
    files.save("a graph", PLAN)
    path = only_file(files)
    files.save("another graph", PLAN)
    (other,) = set(files.path.iterdir()) - {path}
    path.replace(other)
    assert [file.key for file in files.files()] == [None]
    assert files.load("another graph") is None
    assert files.counts()["plan_files_rejected"] == 1


@pytest.mark.parametrize("what", ["directory", "fifo", "link"])
def test_what_is_no_file_of_ours_is_passed_over_and_never_waited_for(files, tmp_path, what):
    files.save("a graph", PLAN)
    path = only_file(files)
    data = path.read_bytes()
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    assert files.load("a graph") is None


def test_a_file_that_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be used"):
        PlanDirectory(tmp_path / "file")


def test_a_directory_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(ArgumentError, match=r"is writable by other users \(mode 770\)"):
        PlanDirectory(tmp_path / "open")
    (tmp_path / "open").chmod(0o755)
    PlanDirectory(tmp_path / "open")


def test_a_directory_of_somebody_elses_is_refused(tmp_path, monkeypatch):
    PlanDirectory(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:  # root may do anything anyway
        PlanDirectory(tmp_path)
        os.chown(tmp_path, 12345, -1)
    with pytest.raises(ArgumentError, match="belongs to another user"):
        PlanDirectory(tmp_path)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_passed_over(files, mode):
    files.save("a graph", PLAN)
    only_file(files).chmod(mode)
    assert files.load("a graph") is None
    files.save("a graph", PLAN)
    assert files.load("a graph") == PLAN
    assert files.counts() == {"plan_files_written": 2, "plan_files_rejected": 1, "plan_files_loaded": 1}


def test_a_file_of_somebody_elses_is_passed_over(files, monkeypatch):
    files.save("a graph", PLAN)
    owner = files.path.stat().st_uid
    if owner == 0:
        os.chown(only_file(files), 12345, -1)
    else:
        users = iter([owner, owner + 1])  # who asks for the directory, and then for the file
        monkeypatch.setattr(os, "geteuid", lambda: next(users))
    assert files.load("a graph") is None
    assert files.counts()["plan_files_rejected"] == 1


def test_a_plan_that_is_larger_than_all_may_be_drives_out_no_other(tmp_path):
    files = PlanDirectory(tmp_path / "plans", most=10_000)
    files.save("a graph", PLAN)
    files.save("a large graph", SavedPlan("eng1", 0, 1, bytes(20_000)))
    assert [file.key for file in files.files()] == ["a graph"]


def test_a_file_of_any_size_is_passed_over_unread(files):
    files.save("a graph", PLAN)
    os.truncate(only_file(files), 1 << 40)
    assert files.load("a graph") is None
    assert [file.plan for file in files.files()] == [None]


def test_what_was_rejected_is_there_no_more(files):
    files.save("a graph", PLAN)
    files.reject("a graph")
    assert list(files.path.iterdir()) == []
    assert files.counts() == {"plan_files_written": 1, "plan_files_rejected": 1}


def test_the_size_is_looked_at_now_and_then(tmp_path, monkeypatch):
    looks, listed = [], plan_directory._listed
    monkeypatch.setattr(plan_directory, "_listed", lambda *given: looks.append(given) or listed(*given))
    files = PlanDirectory(tmp_path / "plans", most=16 * 10_000)
    for _ in range(30):
        files.save("a graph", PLAN)  # of 3 kB each
    assert 2 * 6 <= len(looks) <= 2 * 12


def test_reading_takes_memory_for_what_there_is(files):
    files.save("a graph", PLAN)
    tracemalloc.start()
    try:
        assert files.load("a graph") == PLAN
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_symbolic_link_is_refused(tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "plans")
    with pytest.raises(ArgumentError, match="is a symbolic link"):
        PlanDirectory(tmp_path / "link")


def test_a_directory_that_went_or_was_opened_to_others_is_used_no_further(files):
    files.save("a graph", PLAN)
    files.path.chmod(0o777)
    assert files.load("a graph") is None
    files.save("another graph", PLAN)
    files.path.chmod(0o700)
    assert files.load("another graph") is None
    only_file(files).unlink()
    files.path.rmdir()
    assert files.load("a graph") is None
    files.save("a graph", PLAN)
    files.reject("a graph")
    assert files.counts() == {
        "plan_files_written": 1,
        "plan_files_missed": 3,
        "plan_files_unwritten": 2,
        "plan_files_rejected": 1,
    }


def test_a_full_directory_loses_nothing_and_keeps_no_halves(files, monkeypatch):
    files.save("a graph", PLAN)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    files.save("another graph", PLAN)
    assert files.load("a graph") == PLAN
    assert files.counts()["plan_files_unwritten"] == 1
    assert len(list(files.path.iterdir())) == 1


def test_what_was_used_least_recently_goes_first(tmp_path):
    files = PlanDirectory(tmp_path / "plans", most=40_000)
    for number in range(6):
        files.save(f"graph {number}", PLAN)
    names = {plan.key: files.path / plan.name for plan in files.files()}
    for age, number in enumerate([3, 5, 4, 2, 1, 0]):  # the first was used last
        then = time.time() - 1000 - age
        os.utime(names[f"graph {number}"], (then, then))
    assert files.load("graph 0") == PLAN  # now used
    for number in range(6, 16):
        files.save(f"graph {number}", PLAN)
    left = {plan.key for plan in files.files()}
    assert sum(path.stat().st_size for path in files.path.iterdir()) <= 40_000 + 2 * 4000
    assert "graph 0" in left
    assert not left & {"graph 1", "graph 2"}


def test_what_a_killed_process_left_goes_in_time(files):
    # The second was left before the clock was set back.
    stale = plan_directory._STALE
    ages = {"0123456789abcdef.part": 2 * stale, "456789abcdef0123.part": -2 * stale, "89abcdef01234567.part": 0}
    for name, age in ages.items():
        (files.path / name).write_bytes(b"half a plan")
        then = time.time() - age
        os.utime(files.path / name, (then, then))
    files.save("a graph", PLAN)
    assert [path.name for path in files.path.glob("*.part")] == ["89abcdef01234567.part"]


def test_files_are_listed_cleared_and_told_from_others(files):
    files.save("a graph", PLAN)
    (files.path / ("0" * 40 + ".plan")).write_bytes(b"nothing")
    (files.path / "notes.txt").write_text("somebody's")
    assert sorted((file.key or "", file.plan is not None) for file in files.files()) == [("", False), ("a graph", True)]
    assert files.clear() == 2
    assert [path.name for path in files.path.iterdir()] == ["notes.txt"]


THEIRS = ["film.part", "0123456789ABCDEF.part", "0123456789abcdef0.part", "floor.plan", "0" * 39 + ".plan", "0" * 41 + ".plan"]


def with_theirs(files):
    """Put files of somebody else's there, and old ones: their names, sorted."""
    for name in THEIRS:
        (files.path / name).write_bytes(b"somebody's" * 5000)
        os.utime(files.path / name, (1, 1))
    return sorted(THEIRS)


def theirs_left(files):
    return sorted(path.name for path in files.path.iterdir() if path.read_bytes().startswith(b"somebody's"))


def test_files_of_others_are_not_removed_for_their_age(files):
    there = with_theirs(files)
    files.save("a graph", PLAN)
    assert theirs_left(files) == there


def test_files_of_others_are_not_removed_for_room_and_are_not_counted(tmp_path):
    files = PlanDirectory(tmp_path / "plans", most=40_000)
    there = with_theirs(files)
    files.save("a graph", PLAN)
    assert theirs_left(files) == there
    assert files.load("a graph") == PLAN


def test_files_of_others_are_neither_listed_nor_cleared(files):
    there = with_theirs(files)
    files.save("a graph", PLAN)
    assert [file.key for file in files.files()] == ["a graph"]
    assert files.clear() == 1
    assert theirs_left(files) == there


WRITERS = """
import os, random, signal, sys, time
from handlepool.drivers.executable import SavedPlan
from handlepool.pool.plan_directory import PlanDirectory

path, writers, rounds, killed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "killed"


def write():
    files = PlanDirectory(path)
    for number in range(rounds):
        plan = SavedPlan(key := f"graph {number % 20}", 0, 1, key.encode() * 20_000)
        found = files.load(key)
        assert found is None or found == plan, key
        files.save(key, plan)


def end_of(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


chance, processes, ends = random.Random(7), [], set()
for _ in range(writers):
    process = os.fork()
    if not process:
        write()
        os._exit(0)
    if not killed:
        processes.append(process)
        continue
    until = time.perf_counter() + chance.random() * 0.01
    while time.perf_counter() < until:
        pass
    os.kill(process, signal.SIGKILL)
    ends.add(end_of(process))
print(ends | {end_of(process) for process in processes})
"""
"""One process, so that a writer is forked and starts at once."""


def run_writers(path, writers, rounds, how):
    root = Path(plan_directory.__file__).parents[2]
    command = [sys.executable, "-c", WRITERS, str(path), str(writers), str(rounds), how]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    return done.stdout.strip(), done.stderr


def test_eight_processes_on_one_directory_lose_nothing_and_read_nothing_wrong(files):
    assert run_writers(files.path, 8, 100, "to the end") == ("{0}", "")
    assert {(file.key, file.plan.data) for file in files.files()} == {
        (f"graph {number}", f"graph {number}".encode() * 20_000) for number in range(20)
    }
    assert not list(files.path.glob("*.part"))


@pytest.mark.slow
def test_processes_that_are_killed_while_they_write_leave_nothing_that_is_used(files):
    assert run_writers(files.path, 200, 10**9, "killed") == ("{-9}", "")
    found = list(files.files())
    assert found
    for file in found:
        assert file.plan is not None
        assert file.plan.data == file.key.encode() * 20_000
