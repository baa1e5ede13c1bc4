"""CUDA caching allocator of torch, replayed on allocation events without a GPU.

Rules and sizes follow c10/cuda/CUDACachingAllocator.cpp in torch 2.13 with default settings; the constants are in
c10/core/AllocatorConfig.h. The driver chooses the address of a new segment; here addresses ascend. We do not hold back
memory that another stream still reads, because the trainer and FSDP2 wait on events instead of using `record_stream`.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

MIB = 2**20
MIN_BLOCK, SMALL_SIZE, SMALL_BUFFER = 512, MIB, 2 * MIB
"""kMinBlockSize, to a multiple of which sizes are rounded up; kSmallSize and kSmallBuffer, the largest block and the
segment size of the small pool."""
LARGE_BUFFER, MIN_LARGE, ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB
"""kLargeBuffer, the segment size of the large pool for blocks below kMinLargeAlloc; larger blocks get a dedicated
segment, rounded up to kRoundLarge."""
GRAPH = -2  # stream of allocations in the pool of a CUDA graph
ADDRESSES = 2**21 * LARGE_BUFFER  # address range of an expandable segment, larger than any device's memory


Event = tuple[int, int, int]
"""Allocation of a storage, which may follow its release, or its release: number, bytes or 0, stream."""


class Events:
    """Events in order, packed, because a plan holds millions and hands them to other processes."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.packed: array[int] = array("q", chain.from_iterable(events))

    def __len__(self) -> int:
        return len(self.packed) // 3

    def __iter__(self) -> Iterator[Event]:
        return zip(*[iter(self.packed)] * 3, strict=True)


@dataclass(frozen=True)
class Reserved:
    """Statistics of a replay."""

    allocated: int  # peak bytes in blocks: `torch.cuda.max_memory_allocated`
    reserved: int  # peak bytes reserved from the driver: `torch.cuda.max_memory_reserved`
    retries: int  # allocation retries on a full device, after a synchronizing release of cached segments
    fits: bool  # False if a retry failed: out of memory


STEPS = 3  # number of replayed steps; block addresses are stable afterwards


def steady_reserved(
    before: Iterable[Event], step: Iterable[Event], *, expandable: bool, capacity: int | None = None
) -> Reserved:
    """Replay setup and `STEPS` steps, once more without `capacity` if they do not fit, to tell how much they need."""
    setup, work = list(before), list(step)
    found = replay(repeated(setup, work, STEPS), expandable=expandable, capacity=capacity)
    return found if found.fits else replay(repeated(setup, work, STEPS), expandable=expandable)


def repeated(before: Sequence[Event], step: Sequence[Event], times: int) -> Iterator[list[Event]]:
    """Events of `times` equal steps as in training, one list per step; the first includes the setup. If a step releases
    a storage that it did not allocate, the next step releases an equal one (size, stream) that this step kept. A step
    that keeps other storages is not repeated."""
    yield [*before, *step]
    successors = _successors(before, step)
    if successors is None:
        return
    inside = sorted({storage for storage, size, _ in step if size})
    names = {storage: storage for storage in inside}
    fresh = 1 + max((storage for storage, _, _ in (*before, *step)), default=0)
    for _ in range(times - 1):
        following = {storage: fresh + place for place, storage in enumerate(inside)}
        fresh += len(following)
        # Storages from before the step are the ones kept by the previous step.
        called = following | {storage: names[successor] for storage, successor in successors.items()}
        yield [(called[storage], size, stream) for storage, size, stream in step]
        names = following


def _successors(before: Sequence[Event], step: Sequence[Event]) -> dict[int, int] | None:
    """Map from earlier storages that a step releases to equal storages that it keeps; None if they do not match."""
    allocated = {storage: (size, stream) for storage, size, stream in before if size}
    left = {storage: (size, stream) for storage, size, stream in step if size}
    released = [storage for storage, size, _ in step if not size]
    earlier = [storage for storage in released if storage not in left]
    for storage in released:
        left.pop(storage, None)
    successors: dict[int, int] = {}
    for storage in earlier:
        successor = next((number for number, kind in left.items() if kind == allocated[storage]), None)
        if successor is None:
            return None
        successors[storage] = successor
        del left[successor]
    return None if left else successors


def replay(steps: Iterable[Iterable[Event]], *, expandable: bool, capacity: int | None = None) -> Reserved:
    """Replay equal steps until the block layout is stable; arguments as in `CachingAllocator`."""
    allocator = CachingAllocator(expandable=expandable, capacity=capacity)
    blocks: dict[int, Block] = {}
    found: object = None
    for events in steps:
        for storage, size, stream in events:
            if not size:
                allocator.free(blocks.pop(storage))
            elif (block := allocator.allocate(size, stream)) is not None:
                blocks[storage] = block
            else:
                return allocator.statistics(fits=False)
        left = ([block.address for _, block in sorted(blocks.items())], allocator.layout())
        if left == found and not allocator.retries:
            break
        found = left
    return allocator.statistics(fits=True)


@dataclass(eq=False, slots=True)
class Block:
    """Block of memory in a segment."""

    address: int
    size: int
    pool: "_Pool"
    mapped: bool = True  # False for unmapped address ranges of expandable segments
    allocated: bool = False
    before: "Block | None" = None
    after: "Block | None" = None

    def cut(self, size: int) -> "Block":
        """Shrink to `size` bytes; returns the rest, of the same kind and linked behind it."""
        rest = Block(self.address + size, self.size - size, self.pool, self.mapped, before=self, after=self.after)
        if rest.after is not None:
            rest.after.before = rest
        self.size, self.after = size, rest
        return rest


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of a stream, small or large."""

    small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)  # sizes, addresses and blocks, sorted
    unmapped: list[tuple[int, Block]] = field(default_factory=list)  # addresses and blocks, sorted

    @property
    def page(self) -> int:
        """Page size of expandable segments in bytes."""
        return SMALL_BUFFER if self.small else LARGE_BUFFER

    def put(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """Torch's caching allocator of one device: best fit, splitting and merging, per stream and pool. `expandable` is
    `PYTORCH_ALLOC_CONF=expandable_segments:True`. A `capacity` of None is unlimited."""

    def __init__(self, *, expandable: bool = False, capacity: int | None = None) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._expandable, self._capacity = expandable, capacity
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def allocate(self, size: int, stream: int = 0) -> Block | None:
        """Allocate a block of at least `size` bytes; None if out of memory. A capture starts from an empty cache."""
        if stream == GRAPH and (GRAPH, True) not in self._pools:
            self._release_unused()
            self._pools |= {(GRAPH, small): _Pool(small) for small in (True, False)}
        size = rounded(size)
        small = size <= SMALL_SIZE
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = self._best(pool, size) or self._grow(pool, segment_size(size))
        if block is None:
            self.retries += 1
            self._release_unused()
            block = self._grow(pool, segment_size(size))
            if block is None:
                return None
        rest = block.size - size
        # A large block in a fixed segment keeps a small rest.
        if rest >= MIN_BLOCK and (self._expandable or small or rest > SMALL_SIZE):
            pool.put(block.cut(size))
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block for reuse on its stream."""
        assert block.allocated, "a block is freed once"
        block.allocated = False
        self.allocated -= block.size
        self._merge(block)
        block.pool.put(block)

    def statistics(self, *, fits: bool) -> Reserved:
        """Statistics of all allocations so far."""
        return Reserved(self.peak_allocated, self.peak_reserved, self.retries, fits)

    def layout(self) -> list[list[tuple[int, int]]]:
        """Sizes and addresses of free blocks and of unmapped ranges, by pool."""
        blocks = ([entry[-1] for entry in (*pool.free, *pool.unmapped)] for pool in self._pools.values())
        return [[(block.size, block.address) for block in of_pool] for of_pool in blocks]

    def _best(self, pool: _Pool, size: int) -> Block | None:
        free = pool.free
        place = bisect_left(free, (size, 0))
        if place == len(free):
            return None
        if self._expandable:
            # The last block of an expandable segment counts with the range it can grow into.
            own = _potential(free[place][-1])
            while place + 1 < len(free) and (following := _potential(free[place + 1][-1])) < own:
                place, own = place + 1, following
        return free.pop(place)[-1]

    @staticmethod
    def _merge(block: Block) -> None:
        """Merge a free block that is in no list with free neighbours of its kind."""
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
        """Reserve memory; returns a free block that is in no list yet."""
        if not self._expandable:
            if not self._reserve(size):
                return None
            block = Block(self._next_address, size, pool)
            self._next_address += size
            return block
        block = self._room(pool, size)
        if block.mapped:
            pool.take(block)
        else:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            assert block.after is not None, "the address range is large enough"
            pool.put(block)
            block = self._map(block.after, min(size - block.size, block.after.size))
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        size = -(-size // block.pool.page) * block.pool.page
        if not self._reserve(size):
            return None
        block.pool.take(block)
        if size < block.size:
            block.pool.put(block.cut(size))
        block.mapped = True
        self._merge(block)
        return block

    def _room(self, pool: _Pool, size: int) -> Block:
        """First unmapped range that fits the block, together with free memory before it."""
        for _, block in pool.unmapped:
            start = block.before if block.before is not None and not block.before.allocated else block
            room, at = 0, start
            while at is not None and not at.allocated and room < size:
                room, at = room + at.size, at.after
            if room >= size:
                return start
        # Like torch: an address range larger than the device, aligned to pages of either pool.
        block = Block(self._next_address, ADDRESSES, pool, mapped=False)
        self._next_address += ADDRESSES
        pool.put(block)
        return block

    def _reserve(self, size: int) -> bool:
        if self._capacity is not None and self.reserved + size > self._capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _release_unused(self) -> None:
        """Release unused segments, or the unused pages of expandable ones, except a graph's."""
        for (stream, _), pool in self._pools.items():
            for *_, block in list(pool.free) if stream != GRAPH else ():
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.take(block)
                    self.reserved -= block.size

    def _unmap(self, block: Block) -> None:
        pool = block.pool
        first = -(-block.address // pool.page) * pool.page
        last = (block.address + block.size) // pool.page * pool.page
        if first >= last:
            return
        pool.take(block)
        if block.address < first:
            head, block = block, block.cut(first - block.address)
            pool.put(head)
        if last < block.address + block.size:
            pool.put(block.cut(last - first))
        block.mapped = False
        self.reserved -= last - first
        self._merge(block)
        pool.put(block)


def rounded(size: int) -> int:
    """Block size for a request of `size` bytes."""
    return -(-size // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK


def segment_size(size: int) -> int:
    """Segment size for a new block."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


def _potential(block: Block) -> int:
    following = block.after
    return block.size + (following.size if following is not None and not following.mapped else 0)
