"""Who may touch which byte of shared memory when, for `simt.Machine`."""

import numpy as np

WARP, WARPGROUP = 32, 128
# Threads that a barrier may join: the warp's, the warpgroup's, the CTA's.
_JOINED = (WARP, WARPGROUP, 1 << 30)
_SCOPES = (1, *_JOINED)
_BYTES = 1 << 18


class Ledger:
    """Accesses to shared memory; each must come after those of others that it changes.

    A barrier that two threads both passed in between puts their accesses in order.

    Args:
        threads: of the CTA.
    """

    def __init__(self, threads):
        self.now = 0
        self.met = np.zeros((len(_SCOPES), threads), np.int64)
        self.wrote, self.read = (np.full(_BYTES, -1) for _ in range(2))
        shape = (len(_SCOPES), _BYTES)
        self.writer, self.reader = (np.full(shape, -1) for _ in range(2))
        self.owner, self.owned = np.full(_BYTES, -1), np.full(_BYTES, -1)

    def barrier(self, present, size=None):
        """The present threads meet those of their `size`, or of the whole CTA."""
        self.now += 1
        level = len(_SCOPES) - 1 if size is None else _SCOPES.index(size)
        self.met[1 : level + 1, present] = self.now

    def _ordered(self, bytes_, who, when, whose):
        """Whether what others last did to each byte is behind a barrier."""
        found = (when[bytes_] < 0) | (whose[0][bytes_] == who)
        for level, size in enumerate(_SCOPES[1:], 1):
            same = whose[level][bytes_] == who // size
            found |= same & (self.met[level][who] > when[bytes_])
        return found

    def touch(self, bytes_, who, changes):
        """Threads touch their bytes; `changes` of them change them, or None: they read."""
        who = np.broadcast_to(who[:, None], bytes_.shape)
        self._own(bytes_, who)
        after_writes = self._ordered(bytes_, who, self.wrote, self.writer)
        after_reads = self._ordered(bytes_, who, self.read, self.reader)
        if changes is None:
            assert after_writes.all(), "race: read after write"
            self._note_readers(bytes_, who, after_reads)
            return
        quiet = ~changes[:, None]
        assert (after_writes | quiet).all(), "race: write after write"
        assert (after_reads | quiet).all(), "race: write after read"
        self.wrote[bytes_] = self.now
        for level, size in enumerate(_SCOPES):
            self.writer[level][bytes_] = who // size

    def _own(self, bytes_, who):
        """Warpgroups share a byte only across a barrier of the CTA."""
        group = who // WARPGROUP
        foreign = (self.owner[bytes_] >= 0) & (self.owner[bytes_] != group)
        foreign &= self.met[-1][who] <= self.owned[bytes_]
        shared = foreign & (self.wrote[bytes_] >= self.met[-1][who])
        assert not shared.any(), "race: two warpgroups share a byte"
        self.owner[bytes_], self.owned[bytes_] = group, self.now

    def _note_readers(self, bytes_, who, after_reads):
        several = -2
        for level, size in enumerate(_SCOPES):
            whose, mine = self.reader[level], who // size
            alone = after_reads | (whose[bytes_] == mine)
            whose[bytes_] = np.where(alone, mine, several)
            # Other threads read the byte in the same step.
            whose[bytes_[whose[bytes_] != mine]] = several
        self.read[bytes_] = self.now
