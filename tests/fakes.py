"""Whole-array kernels for tests: the reference under a backend's name, and a record."""

import contextlib

import jax

from jaxtile import pallas_lowering, primitives
from jaxtile.pallas_lowering import _registry, load_all
from jaxtile.primitives._define import PLATFORM, REFERENCES

BOTH = (primitives.reduce_p, primitives.scan_p)
ALL = (*BOTH, primitives.mma_p)


class Kernels:
    """Empties every backend's table for a test, and fills it with fakes.

    Args:
        monkeypatch: pytest's.

    Attributes:
        ran: (backend, primitive's name, shape of the first operand) of every trace of a
            fake.
        given: the names of the parameters that the last one was given.
        platform: for which arithmetic outside the kernel was written in the last one.
    """

    def __init__(self, monkeypatch):
        load_all()
        jax.clear_caches()  # what an earlier fake of the same call left compiled
        self.ran, self.given, self.platform, self._patch = [], set(), "", monkeypatch
        for backend in _registry.BACKENDS.values():
            monkeypatch.setattr(backend, "wholes", {})
            free = backend.hooks._replace(unavailable=lambda: None)
            monkeypatch.setattr(backend, "hooks", free)

    def serve(self, platform, *names):
        """Let backends serve a platform in this order, for tests that run on the CPU."""
        self._patch.setitem(pallas_lowering.SERVES, platform, names)

    def add(self, name, **predicates):
        """A fake of every primitive with whole-array kernels for a backend."""
        for primitive in ALL:
            self._add(_registry.BACKENDS[name], primitive, predicates)

    def _add(self, backend, primitive, predicates):
        @backend.runs(primitive, **predicates)
        def run(*arrays, **params):
            self.ran.append((backend.name, primitive.name, arrays[0].shape))
            self.given = set(params)
            self.platform = PLATFORM.get()
            return REFERENCES[primitive](*arrays, platform="cpu", **params)

    def backends(self):
        """The backends whose fakes were traced, in order."""
        return [name for name, _, _ in self.ran]

    @contextlib.contextmanager
    def expect(self, *names):
        """Exactly these backends' fakes are traced in the block."""
        del self.ran[:]
        yield
        assert self.backends() == list(names)
