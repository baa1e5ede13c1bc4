"""What torch's caching allocator reserves on CUDA for a story of allocations: its rules, replayed without a GPU.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.13 at its defaults; c10/core/AllocatorConfig.h
has the constants. Where a fresh segment lies is the driver's choice; here each lies above those before. Memory that
another stream still reads is not held back: the trainer and FSDP2 wait by events instead of `record_stream`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MIB = 2**20

MIN_BLOCK = 512
"""Bytes that sizes are rounded up to."""
SMALL_SIZE = MIB
"""Largest block of the small pool."""
SMALL_BUFFER = 2 * MIB
"""What the small pool asks the driver for."""
LARGE_BUFFER = 20 * MIB
"""What the large pool asks for on behalf of less than `MIN_LARGE`."""
MIN_LARGE = 10 * MIB
"""From here on a segment is made to measure."""
ROUND_LARGE = 2 * MIB
"""What those are rounded up to."""

ADDRESSES = 2**21 * LARGE_BUFFER
"""What an expandable segment may grow to: more than any device has."""


class Event(NamedTuple):
    """A storage is born, or dies."""

    storage: int
    """Its number; one that has died may be born again."""
    size: int
    """Bytes of it; 0 where it dies."""
    stream: int
    """On which stream; of no meaning where it dies."""


@dataclass(frozen=True)
class Reserved:
    """What the allocator did."""

    allocated: int
    """Most bytes in use, as `torch.cuda.max_memory_allocated` counts them: whole blocks."""
    reserved: int
    """Most bytes taken from the driver: `torch.cuda.max_memory_reserved`."""
    retries: int
    """How often the device was full, and unused segments had to be given back first, which stops everything."""
    fits: bool
    """False where even then there was no room: out of memory."""


@dataclass(frozen=True)
class Reservations:
    """What is reserved once steps repeat themselves, in the two ways that torch has."""

    segments: Reserved
    """As torch does unless it is told otherwise."""
    expandable: Reserved
    """With `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`."""


STEPS = 3
"""How often the step is replayed. What it leaves behind in other places than it found it settles by then."""


def reservations(before: Sequence[Event], step: Sequence[Event], capacity: int | None = None) -> Reservations:
    """Let both allocators serve a run: what is before the step, and some steps.

    Args:
        before: events up to the step.
        step: events of the step.
        capacity: bytes that the driver has to give; None has no end.
    """
    return Reservations(
        _served(_steps(before, step, STEPS), expandable=False, capacity=capacity),
        _served(_steps(before, step, STEPS), expandable=True, capacity=capacity),
    )


def replay(events: Iterable[Event], *, expandable: bool, capacity: int | None = None) -> Reserved:
    """Let an allocator serve events in their order.

    Args:
        events: births and deaths; one that is not born cannot die.
        expandable: with expandable segments, which grow by a page at a time, else with segments of fixed size.
        capacity: bytes that the driver has to give; None has no end.
    """
    return _served([events], expandable=expandable, capacity=capacity)


def repeated(before: Sequence[Event], step: Sequence[Event], times: int) -> list[Event]:
    """A story in which a step follows on itself, as steps of training do.

    What a step finds from before, and lets go of, is in the next one what this one has left behind: a storage of the
    same size and stream. Where a step leaves behind what no step lets go of, it is not repeated.

    Args:
        before: events up to the step.
        step: events of the step.
        times: how often it runs in all.
    """
    return [event for events in _steps(before, step, times) for event in events]


def _steps(before: Sequence[Event], step: Sequence[Event], times: int) -> Iterator[list[Event]]:
    """That story, step by step; what is before the first belongs to it."""
    yield [*before, *step]
    heirs = _heirs(before, step)
    if heirs is None:
        return
    inside = sorted({event.storage for event in step if event.size})
    names = {storage: storage for storage in inside}
    fresh = 1 + max((event.storage for event in (*before, *step)), default=0)
    for _ in range(times - 1):
        following = {storage: fresh + place for place, storage in enumerate(inside)}
        fresh += len(following)
        # What was there before the step goes by the name of what the step before has left.
        called = following | {storage: names[heir] for storage, heir in heirs.items()}
        yield [Event(called[event.storage], event.size, event.stream) for event in step]
        names = following


def _heirs(before: Sequence[Event], step: Sequence[Event]) -> dict[int, int] | None:
    """For each storage that a step finds and lets go of, one that it leaves behind; None where they do not match."""
    born = {event.storage: event for event in before if event.size}
    left = {event.storage: event for event in step if event.size}
    found = [event.storage for event in step if not event.size and event.storage not in left]
    for event in step:
        if not event.size:
            left.pop(event.storage, None)
    heirs: dict[int, int] = {}
    for storage in found:
        kind = born[storage][1:]
        heir = next((number for number, event in left.items() if event[1:] == kind), None)
        if heir is None:
            return None
        heirs[storage] = heir
        del left[heir]
    return None if left else heirs


def _served(steps: Iterable[Iterable[Event]], *, expandable: bool, capacity: int | None) -> Reserved:
    """Let an allocator serve steps that are alike until one leaves everything where it has found it."""
    allocator = CachingAllocator(expandable=expandable, capacity=capacity)
    blocks: dict[int, Block] = {}
    found: object = None
    for events in steps:
        for event in events:
            if not event.size:
                allocator.free(blocks.pop(event.storage))
                continue
            block = allocator.allocate(event.size, event.stream)
            if block is None:
                return Reserved(allocator.most_allocated, allocator.most_reserved, allocator.retries, False)
            blocks[event.storage] = block
        left = ([block.address for _, block in sorted(blocks.items())], allocator.layout())
        if left == found and capacity is None:
            break
        found = left
    return Reserved(allocator.most_allocated, allocator.most_reserved, allocator.retries, True)


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    pool: "_Pool"
    mapped: bool = True
    """Whether there is memory behind it; of expandable segments parts are addresses alone."""
    allocated: bool = False
    before: "Block | None" = None
    after: "Block | None" = None


@dataclass(eq=False)
class _Pool:
    """Free blocks of a stream, either small or large."""

    small: bool
    free: list[Block] = field(default_factory=list)
    """By size, then address."""
    keys: list[tuple[int, int]] = field(default_factory=list)
    """Sizes and addresses of those, in their order."""
    unmapped: list[Block] = field(default_factory=list)
    """By address."""

    @property
    def page(self) -> int:
        """Bytes that an expandable segment grows by."""
        return SMALL_BUFFER if self.small else LARGE_BUFFER

    def put(self, block: Block) -> None:
        if block.mapped:
            key = (block.size, block.address)
            place = bisect_left(self.keys, key)
            self.keys.insert(place, key)
            self.free.insert(place, block)
        else:
            insort(self.unmapped, block, key=lambda it: it.address)

    def take(self, block: Block) -> None:
        if block.mapped:
            self.pop(bisect_left(self.keys, (block.size, block.address)))
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address, key=lambda it: it.address)]

    def pop(self, place: int) -> Block:
        """Take the free block at a place."""
        del self.keys[place]
        return self.free.pop(place)


class CachingAllocator:
    """Torch's allocator of one device.

    A pool for small and one for large blocks of each stream; a request gets the smallest free block that is large
    enough, the lowest among equals, cut to size; what is given back is joined with free neighbours.

    Args:
        expandable: as `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` has it.
        capacity: bytes that the driver has to give; None has no end.
    """

    def __init__(self, *, expandable: bool = False, capacity: int | None = None) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = self.retries = 0
        self._expandable, self._capacity = expandable, capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def allocate(self, size: int, stream: int = 0) -> Block | None:
        """A block of at least so many bytes; None where the device is full."""
        size = rounded(size)
        small = size <= SMALL_SIZE
        pool = self._pools.setdefault((stream, small), _Pool(small))
        wanted = segment_size(size)
        block = self._best(pool, size) or self._grow(pool, wanted)
        if block is None:
            self.retries += 1
            self._release_unused()
            block = self._grow(pool, wanted)
        if block is None:
            return None
        self._split(block, size)
        block.allocated = True
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back, which serves its own stream again."""
        assert block.allocated, "a block is freed once"
        block.allocated = False
        self.allocated -= block.size
        self._merge(block)
        block.pool.put(block)

    def blocks(self) -> list[Block]:
        """All free blocks that have memory behind them."""
        return [block for pool in self._pools.values() for block in pool.free]

    def layout(self) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
        """Of each pool, sizes and addresses of what is free, with memory behind it and without."""
        return [
            (list(pool.keys), [(block.size, block.address) for block in pool.unmapped]) for pool in self._pools.values()
        ]

    def _best(self, pool: _Pool, size: int) -> Block | None:
        place = bisect_left(pool.keys, (size, 0))
        if place == len(pool.free):
            return None
        if self._expandable:
            # The end of an expandable segment counts as all that it can become.
            while place + 1 < len(pool.free) and _potential(pool.free[place + 1]) < _potential(pool.free[place]):
                place += 1
        return pool.pop(place)

    def _split(self, block: Block, size: int) -> None:
        """Cut a block to a size, where the rest is worth keeping."""
        rest = block.size - size
        if rest < MIN_BLOCK or (not self._expandable and not block.pool.small and rest <= SMALL_SIZE):
            return
        remaining = Block(block.address + size, rest, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = remaining
        block.size, block.after = size, remaining
        block.pool.put(remaining)

    @staticmethod
    def _merge(block: Block) -> None:
        """Join a free block, which is in no list, with free neighbours of its kind."""
        for other in (block.before, block.after):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            block.pool.take(other)
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block

    def _grow(self, pool: _Pool, size: int) -> Block | None:
        """A free block, in no list, of memory that is new in whole or in part."""
        if self._expandable:
            return self._expand(pool, size)
        if not self._reserve(size):
            return None
        block = Block(self._next_address, size, pool)
        self._next_address += size
        return block

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        block = self._room(pool, size)
        if block.mapped:
            pool.take(block)
        elif (mapped := self._map(block, min(block.size, size))) is None:
            return None
        else:
            block = mapped
        while block.size < size:
            assert block.after is not None, "there are addresses enough"
            wanted = min(size - block.size, block.after.size)
            pool.put(block)
            grown = self._map(block.after, wanted)
            if grown is None:
                return None
            block = grown
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put memory behind the beginning of a piece of addresses; returns it, joined with what is free before it."""
        size = -(-size // block.pool.page) * block.pool.page
        if not self._reserve(size):
            return None
        block.pool.take(block)
        if size < block.size:
            rest = Block(block.address + size, block.size - size, block.pool, mapped=False)
            rest.before, rest.after, block.after, block.size = block, block.after, rest, size
            if rest.after is not None:
                rest.after.before = rest
            block.pool.put(rest)
        block.mapped = True
        self._merge(block)
        return block

    def _room(self, pool: _Pool, size: int) -> Block:
        """The first addresses, with the free memory before them, that such a block would fit into."""
        for block in pool.unmapped:
            start = block.before if block.before is not None and not block.before.allocated else block
            room, at = 0, start
            while at is not None and not at.allocated and room < size:
                room, at = room + at.size, at.after
            if room >= size:
                return start
        # As torch does: addresses for more than the device has, where whole pages of either pool begin.
        block = Block(self._next_address, ADDRESSES, pool, mapped=False)
        self._next_address += ADDRESSES
        pool.put(block)
        return block

    def _reserve(self, size: int) -> bool:
        if self._capacity is not None and self.reserved + size > self._capacity:
            return False
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return True

    def _release_unused(self) -> None:
        """Give back whole segments, or pages of expandable ones, that nothing lies in."""
        for pool in self._pools.values():
            for block in list(pool.free):
                if not self._expandable:
                    if block.before is None and block.after is None:
                        pool.take(block)
                        self.reserved -= block.size
                    continue
                self._unmap(block)

    def _unmap(self, block: Block) -> None:
        """Take the memory from behind the whole pages of a free block."""
        pool = block.pool
        first = -(-block.address // pool.page) * pool.page
        last = (block.address + block.size) // pool.page * pool.page
        if first >= last:
            return
        pool.take(block)
        if block.address < first:
            head = Block(block.address, first - block.address, pool, before=block.before, after=block)
            if block.before is not None:
                block.before.after = head
            block.before = head
            pool.put(head)
        if last < block.address + block.size:
            tail = Block(last, block.address + block.size - last, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = tail
            block.after = tail
            pool.put(tail)
        block.address, block.size, block.mapped = first, last - first, False
        self.reserved -= last - first
        self._merge(block)
        pool.put(block)


def rounded(size: int) -> int:
    """Bytes of the block that holds so many."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Bytes that the driver is asked for on behalf of a block."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


def _potential(block: Block) -> int:
    following = block.after
    return block.size + (following.size if following is not None and not following.mapped else 0)
