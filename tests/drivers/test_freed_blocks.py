"""Freed memory of a recording, by sizes."""

from handlepool.drivers.freed_blocks import FreedBlocks


def everybodys(block):
    return True


def freed(*blocks):
    """Blocks are their sizes, and a letter."""
    found = FreedBlocks()
    for block in blocks:
        found.of_size(block[0]).append(block)
    return found


def test_the_smallest_that_is_large_enough_is_taken_and_of_one_size_the_last_that_was_freed():
    blocks = freed((512, "a"), (2048, "b"), (1024, "c"), (1024, "d"))
    assert [blocks.take(1024, everybodys)[0] for _ in range(3)] == [(1024, "d"), (1024, "c"), (2048, "b")]
    assert blocks.take(1024, everybodys) is None


def test_what_is_more_than_twice_as_large_is_not_taken():
    blocks = freed((2048, "a"), (4096, "b"))
    assert blocks.take(1024, everybodys)[0] == (2048, "a")
    assert blocks.take(1024, everybodys) is None


def test_what_nobody_may_have_stays_and_a_larger_one_is_asked_for():
    blocks, asked = freed((1024, "a"), (1536, "b")), []

    def may_have(block):
        asked.append(block)
        return block[1] == "b"

    block, home = blocks.take(1024, may_have)
    assert (block, home, asked) == ((1536, "b"), [], [(1024, "a"), (1536, "b")])
    home.append(block)
    assert [*blocks.take_all()] == [(1024, "a"), (1536, "b")]


def test_the_first_and_the_last_of_many_are_asked_for():
    blocks, asked = freed(*[(512, number) for number in range(100)]), []
    assert blocks.take(512, asked.append) is None
    assert [number for _, number in asked] == [99, 98, 97, 96, 0, 1, 2, 3]


def test_a_block_that_another_thread_takes_meanwhile_is_not_taken_twice():
    blocks = freed((512, "a"), (512, "b"))

    def may_have(block):
        if block[1] == "b":
            blocks.of_size(512).remove(block)
        return True

    assert blocks.take(512, may_have)[0] == (512, "a")
