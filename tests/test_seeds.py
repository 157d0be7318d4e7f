"""The run's seed decides the random numbers of a test."""

import random
import subprocess
import sys

from harness import seeds


def numbers():
    return [random.random() for _ in range(3)]


def test_the_seed_and_the_name_of_a_test_decide_its_random_numbers(request, monkeypatch):
    drawn = numbers()
    seeds.begin(request.node.nodeid)
    assert numbers() == drawn
    seeds.begin("another test")
    assert numbers() != drawn
    monkeypatch.setattr(seeds, "SEED", seeds.SEED + 1)
    seeds.begin(request.node.nodeid)
    assert numbers() != drawn


def test_a_run_without_a_seed_draws_one_that_its_processes_inherit(monkeypatch):
    program = "import os; from harness.seeds import SEED; print(SEED, os.environ['HANDLEPOOL_SEED'])"

    def drawn():
        return subprocess.check_output([sys.executable, "-c", program], cwd=seeds.__file__.rpartition("harness")[0], text=True)

    monkeypatch.setenv("HANDLEPOOL_SEED", "7")
    assert drawn() == "7 7\n"
    monkeypatch.delenv("HANDLEPOOL_SEED")
    first, second = drawn().split(), drawn().split()
    assert first[0] == first[1] != second[0]
