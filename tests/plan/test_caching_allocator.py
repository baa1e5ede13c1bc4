"""Caching allocator: small cases with known results, and invariants of random allocations."""

import itertools
import random
from collections.abc import Sequence

import pytest

from titan_exp.plan.caching_allocator import (
    MIB,
    Block,
    CachingAllocator,
    Events,
    repeated,
    replay,
    steady_reserved,
)


def story(*words: str) -> list[tuple[int, int, int]]:
    """`a12` takes 12 MiB under the name a on stream 0, `b3@1` 3 MiB on stream 1; `-a` gives a back."""
    events = []
    for word in words:
        if word.startswith("-"):
            events.append((ord(word[1]), 0, 0))
        else:
            size, _, stream = word[1:].partition("@")
            events.append((ord(word[0]), int(float(size) * MIB), int(stream or 0)))
    return events


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([512, 513], 512 + 1024, 2 * MIB),
        # Up to 1 MiB is small; two of that fill a segment.
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        # From there to 10 MiB shares segments of 20 MiB, from 10 MiB on segments are made to measure.
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        # A rest of 1 MiB or less is not split off, so all of the block counts.
        ([10 * MIB + 1], 12 * MIB - 2 * MIB + 512, 12 * MIB),
        ([11 * MIB], 12 * MIB, 12 * MIB),
        # The fourth does not fit into what three leave of 20 MiB.
        ([6 * MIB] * 3, 18 * MIB, 20 * MIB),
        ([6 * MIB] * 4, 24 * MIB, 40 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(sizes: Sequence[int], allocated: int, reserved: int):
    found = replay([[(number, size, 0) for number, size in enumerate(sizes)]], expandable=False)
    assert (found.allocated, found.reserved) == (allocated, reserved)


@pytest.mark.parametrize(
    ("words", "segments", "expandable"),
    [
        # What is given back serves whatever fits into it; the next size does not.
        ("a12 -a b12", 12, 20),
        ("a12 -a b14", 12 + 14, 20),
        # The smallest block that is large enough: 16 takes the one of 16, so that 24 still has its own.
        ("a24 b2 c16 d2 -a -c e16 f24", 24 + 20, 60),
        # Free neighbours become one block again.
        ("a6 b6 c6 -a -c -b d18", 20, 20),
        ("a6 b6 c6 -a -c d12", 20 + 12, 40),
        # Every stream has its own.
        ("a12@1 -a b12", 24, 40),
        ("a12@1 -a b12@1", 12, 20),
        # Small and large pools lend each other nothing.
        ("a1 -a b2", 2 + 20, 2 + 20),
        # A segment that grows needs no second one: 12, then 30 in its place.
        ("a12 -a b30", 12 + 30, 40),
        ("a30 -a b12 c18", 30, 40),
        # 10 MiB do not fit below b, the end of the segment grows; later what a left serves d.
        ("a8 b8 -a c10 d8", 20 + 10, 40),
        # The free end of a growing segment, 10 MiB, counts as all that it can become: c gets the 12 of a.
        ("a12 b18 -a c8 d12", 12 + 18 + 12, 60),
    ],
)
def test_cases_by_hand(words: str, segments: int, expandable: int):
    events = story(*words.split())
    assert replay([events], expandable=False).reserved == segments * MIB
    assert replay([events], expandable=True).reserved == expandable * MIB


def test_full_device_releases_cached_segments_then_runs_out_of_memory():
    events = story("a12", "b14", "-a", "c16")
    assert replay([events], expandable=False).reserved == 42 * MIB
    found = replay([events], expandable=False, capacity=32 * MIB)
    assert (found.fits, found.retries, found.reserved) == (True, 1, 30 * MIB)
    assert not replay([events], expandable=False, capacity=29 * MIB).fits
    # Pages of an expandable segment are given back one by one: 26 MiB lie in two, of which the first is free by then.
    events = story("a20", "b2", "-a", "c10@1")
    found = replay([events], expandable=True, capacity=40 * MIB)
    assert (found.fits, found.retries, found.reserved) == (True, 1, 40 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("capacity", [None, 600 * MIB])
def test_invariants_of_random_allocations(expandable: bool, capacity: int | None):
    for seed in range(20):
        chance, allocator, held = random.Random(seed), CachingAllocator(expandable=expandable, capacity=capacity), []
        for _ in range(400):
            if held and chance.random() < 0.48:
                allocator.free(held.pop(chance.randrange(len(held))))
            else:
                size = int(2 ** chance.uniform(0, 26))
                block = allocator.allocate(size, chance.randrange(3))
                assert block is not None or capacity is not None
                if block is not None:
                    assert block.size >= size
                    held.append(block)
            assert_sound(allocator, held)
        for block in held:
            allocator.free(block)
        assert allocator.allocated == 0
        # Nothing is cut any more: free blocks have no free neighbours of their kind.
        assert_sound(allocator, [])


def assert_sound(allocator: CachingAllocator, held: list[Block]) -> None:
    """No byte is lost or allocated twice, and free neighbours are merged."""
    every = sorted(
        [*held, *(block for pool in allocator._pools.values() for *_, block in pool.free)],
        key=lambda block: block.address,
    )
    assert sum(block.size for block in every) == allocator.reserved <= allocator.peak_reserved
    assert sum(block.size for block in held) == allocator.allocated <= allocator.peak_allocated
    for block, following in itertools.pairwise(every):
        assert block.address + block.size <= following.address
    for block in every:
        after = block.after
        assert after is None or (after.before is block and after.address == block.address + block.size)
        assert after is None or block.allocated or after.allocated or block.mapped != after.mapped
        assert after is None or after.pool is block.pool


def test_steps_repeat():
    # Each step takes what the step before has left (gradients, say) and leaves its own.
    before, step = story("a4", "g12"), story("t16", "-g", "h12", "-t")
    found = [event for events in repeated(before, step, 3) for event in events]
    assert sum(1 for _, size, _ in found if size) == 2 + 3 * 2
    alive: dict[int, int] = {}
    for storage, size, _ in found:
        if size:
            assert storage not in alive
            alive[storage] = size
        else:
            del alive[storage]
    assert sorted(alive.values()) == [4 * MIB, 12 * MIB]
    # a and g share a segment and h takes g's place, in every step; t has one of its own.
    assert steady_reserved(before, step, expandable=False).reserved == (20 + 16) * MIB


def test_packed_events_are_the_events():
    events = story("a4", "g12", "-g", "b1500@2")
    before, step = Events(events[:2]), Events(events[2:])
    assert [*before, *step] == events
    assert len(before) == len(step) == 2
    assert steady_reserved(before, step, expandable=True) == steady_reserved(events[:2], events[2:], expandable=True)


def test_leaking_step_is_not_repeated():
    before, step = story("a4"), story("b4", "c4", "-c")
    assert list(repeated(before, step, 3)) == [[*before, *step]]
