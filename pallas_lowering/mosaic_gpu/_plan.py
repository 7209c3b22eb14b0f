"""How a reduction or scan is cut into warps, CTAs and launches: one rule a kernel.

Every span is a power of two of elements and aligned to its size, so that the parts'
trees are the subtrees of `fixed_tree`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Warps that keep an H200's memory busy.
_ENOUGH_WARPS = 8192
# Values of state that a thread keeps in registers for one tile.
_MOST_VALUES = 64
# Loads of one thread in flight; more cost registers, and warps with them.
_MOST_LOADS = 8
# Tiles that one warp streams; more make its counter of partial trees too deep.
_MOST_TILES = 8
# Rows this short get a thread each.
SHORT_ROW = 32
# Places of a row that a thread folds at a time.
STAGE = 32
_MOST_WARPS_OF_ROW = 16


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class Rows:
    """Warps along rows.

    Args:
        vector: neighbours that one load takes.
        registers: loads of a tile.
        span: elements of one warp.
        warps: warps of one unit (a chunk of a row).
        chunks: units of a row; more than one need another launch.
    """

    vector: int
    registers: int
    span: int
    warps: int
    chunks: int

    @property
    def tile(self) -> int:
        """Elements that a warp holds at once."""
        return 32 * self.vector * self.registers

    @property
    def chunk(self) -> int:
        """Elements of one unit."""
        return self.span * self.warps


def reduce_rows(outer: int, n: int, vector: int, leaves: int) -> Rows:
    """Whole rows in few warps; chunks of them where there are few rows."""
    most = max(1, _MOST_VALUES // (vector * leaves))
    most = min(most, _MOST_LOADS)
    registers = min(power_of_two(most + 1) // 2, power_of_two(-(-n // (32 * vector))))
    tile = 32 * vector * registers
    tiles = -(-n // tile)
    longest = power_of_two(outer * tiles // _ENOUGH_WARPS + 1) // 2
    if tiles <= _MOST_WARPS_OF_ROW:
        longest = 1
    span = tile * max(1, min(_MOST_TILES, longest))
    warps = min(_MOST_WARPS_OF_ROW, -(-n // span))
    if -(-n // span) > warps or warps <= 2:
        warps = power_of_two(warps)
    return Rows(vector, registers, span, warps, -(-n // (span * warps)))


# Warps of a CTA where each thread has fibres of its own.
WARPS = 4


@dataclass(frozen=True)
class Columns:
    """A thread for each chunk of each fibre.

    Args:
        vector: neighbouring fibres of one thread.
        block: places written out in the loop's body.
        chunk: elements of one thread's stretch of a fibre.
        chunks: stretches of a fibre; more than one need another launch.
        ring: blocks that a thread copies to shared memory ahead; 0 loads to registers.
    """

    vector: int
    block: int
    chunk: int
    chunks: int
    ring: int = 0


def reduce_columns(
    fibres: int, n: int, vector: int, leaves: int, whole: bool
) -> Columns:
    """Long stretches where there are many fibres; `whole` forbids cutting them."""
    if whole:
        return Columns(vector, min(n, STAGE), n, 1)
    block = min(power_of_two(n), max(4, 64 // (vector * leaves)))
    blocks = power_of_two(-(-n // block))
    threads = fibres // vector
    per_thread = threads * blocks // (16 * _ENOUGH_WARPS)
    chunk = block * max(1, min(32, power_of_two(per_thread)))
    return Columns(vector, block, chunk, -(-n // chunk))


# Threads that keep an H200's memory busy with one element each in flight at a time.
_ENOUGH_THREADS = 16384
# Fewer warps than this leave multiprocessors without work.
_FEW_WARPS = 1024


def scan_rows(outer: int, n: int, vector: int, leaves: int) -> Rows:
    """A warp streams a row; several share one where there are few; else chunks.

    Several are whole warpgroups: their barrier is the CTA's, which holds one unit then.

    A tile's loads cost registers for what each lane was handed, five of a leaf each.
    """
    registers = min(max(1, 8 // leaves), power_of_two(-(-n // (32 * vector))))
    tile = 32 * vector * registers
    tiles = -(-n // tile)
    warps = 1 if tiles <= 2 else min(_MOST_WARPS_OF_ROW, max(4, power_of_two(tiles)))
    if outer * warps >= _ENOUGH_WARPS and tiles > _MOST_WARPS_OF_ROW:
        warps //= 2
    if outer * warps < _FEW_WARPS:
        warps = min(warps, 4)  # many small CTAs fill the last wave better
    steps = -(-n // (tile * warps))
    chunk = tile * warps * power_of_two(steps)
    if outer * warps < _FEW_WARPS and steps > 2:
        chunk = tile * warps  # streaming several tiles costs 4 to 9 % here
    return Rows(vector, registers, chunk // warps, warps, -(-n // chunk))


def scan_columns(fibres: int, n: int, vector: int, leaves: int, whole: bool) -> Columns:
    """A thread walks a fibre; where there are few fibres, a chunk of one."""
    if whole or fibres >= _ENOUGH_THREADS:
        while vector > 1 and fibres // vector < 4 * _ENOUGH_THREADS:
            vector //= 2
        # Few threads must each have much in flight, and have registers to spare.
        values = 64 if fibres < 4 * _ENOUGH_THREADS else 32
        block = min(power_of_two(n), max(4, values // (vector * leaves)))
        return Columns(vector, block, n if whole else power_of_two(n), 1)
    block = min(power_of_two(n), max(4, 64 // (vector * leaves)))
    wanted = -(-16 * _ENOUGH_THREADS * vector // fibres)
    chunk = max(4 * block, power_of_two(-(-n // wanted)))
    return Columns(vector, block, chunk, -(-n // chunk))


# Warps of a CTA that scans neighbouring fibres, what a thread has in flight, and CTAs that
# keep a GPU's memory busy, one on each multiprocessor.
STRIPE_WARPS, _STRIPE_VALUES, _ENOUGH_STRIPES = 16, 48, 96


# A lane takes 4 bytes of a place: the fewer its fibres, the longer are its chains.
_STRIPE_NARROWER, _STRIPE_BLOCK = 4, 32


def scan_stripes(fibres: int, n: int, vector: int, leaves: int) -> Columns | None:
    """A CTA for 32 neighbours, where there are too few for a thread each; else None."""
    vector = max(1, vector // _STRIPE_NARROWER)
    while vector > 1 and fibres // vector < 32 * _ENOUGH_STRIPES:
        vector //= 2
    block = min(_STRIPE_BLOCK, max(4, _STRIPE_VALUES // (vector * leaves)))
    block = power_of_two(block + 1) // 2
    if fibres // vector < 32 * _ENOUGH_STRIPES or n < 4 * STRIPE_WARPS * block:
        return None
    return Columns(vector, block, n, 1)


# Places of a ring's block, blocks of a ring, and the most shared memory of a CTA that
# has a multiprocessor for itself.
_RING_BLOCK, _RING, _RING_BYTES = 8, 8, 128 * 1024


def ringed(plan: Columns, fibres: int, bytes_each: int) -> Columns:
    """Chains of few threads through shared memory: registers hold too few loads.

    Args:
        plan: the chain's.
        fibres: how many there are.
        bytes_each: of a place of a fibre.
    """
    threads = fibres // plan.vector
    if threads >= 4 * _ENOUGH_THREADS or plan.chunk < 4 * _RING * _RING_BLOCK:
        return plan
    room = _RING_BYTES if threads <= 2 * _ENOUGH_THREADS else _RING_BYTES // 2
    most = room // (32 * WARPS * _RING_BLOCK * plan.vector * bytes_each)
    ring = min(_RING, power_of_two(most + 1) // 2)
    return replace(plan, block=_RING_BLOCK, ring=ring) if ring >= 4 else plan
