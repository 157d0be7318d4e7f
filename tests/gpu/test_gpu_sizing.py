"""Memory of a GPU for handles and streams is as docs/sizing.md says, within a tenth; in processes of their own."""

import subprocess
import sys

import pytest

HANDLE, STREAM = 8.75, 0.56
"""MiB, as the page has them."""
SCRIPT = """
import sys, threading
import handlepool

device, threads, streams = map(int, sys.argv[1:])
pool = handlepool.default_pool()
driver = pool.driver
together = threading.Barrier(threads + 1)

def used():
    free, total = driver.memory_info()
    return total - free

def work():
    with driver.device(device):
        mine = [driver.create_stream() for _ in range(streams)]
        for stream in mine:
            pool.get_handle(stream)
        together.wait(60)
        together.wait(60)

with driver.device(device):
    pool.get_handle()  # the first one costs what later ones do not
    before = used()
    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    together.wait(60)
    print((used() - before) / 2**20, pool.stats(device)["handles_live"] - 1)
    together.wait(60)
    for thread in running:
        thread.join()
"""


@pytest.mark.alone
@pytest.mark.parametrize("device", [0, pytest.param(1, marks=pytest.mark.two_gpus)])
@pytest.mark.parametrize(("threads", "streams"), [(8, 4), (16, 8)])
def test_memory_is_as_the_page_says(device, threads, streams):
    arguments = map(str, (device, threads, streams))
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found, handles = map(float, done.stdout.split())
    assert handles == threads * streams
    assert found == pytest.approx(handles * (HANDLE + STREAM), rel=0.1)
