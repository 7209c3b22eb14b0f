"""Calls of reduce and scan inside Mosaic GPU kernels: to lower, to simulate, to run."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtile as jt
import targets

# The largest |value| with its index, and how many elements were seen: float, int, int.
FARTHEST = jt.Reducer(
    merge=lambda a, b: (
        jnp.where(jnp.abs(b[0]) > jnp.abs(a[0]), b[0], a[0]),
        jnp.where(jnp.abs(b[0]) > jnp.abs(a[0]), b[1], a[1]),
        a[2] + b[2],
    ),
    lift=lambda e: (e[0], e[1], jnp.int32(1)),
    laws=jt.Laws(associative=True),
    name="farthest",
)
# Of nothing it is none of the values that it adds up.
TOTAL = jt.Reducer(
    merge=lambda a, b: a + b,
    identity=0.0,
    empty=-7.0,
    update=lambda s, e: s + e,
    laws=jt.Laws(associative=True, commutative=True),
    name="total",
)
REDUCERS = {
    "add": jt.add,
    "multiply": jt.multiply,
    "logical_or": jt.logical_or,
    "maximum": jt.maximum,
    "minimum": jt.minimum,
    "logaddexp": jt.logaddexp,
    "argmax": jt.argmax,
    "argmin": jt.argmin,
    "welford": jt.welford,
    "affine": jt.affine,
    "farthest": FARTHEST,
    "total": TOTAL,
}
_SEEDABLE = ("add", "multiply", "maximum", "minimum", "logaddexp", "affine")


def data(shape, dtype="float32", seed=0):
    """Values of very different sizes."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    wide = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)
    return wide.astype(jnp.dtype(dtype))


@dataclass(frozen=True)
class Call:
    """A reduce or scan of blocks that are loaded whole.

    Args:
        op: "reduce" or "scan".
        name: of the reducer.
        shape, axis, policy: the call's; `axis` may be a tuple.
        layout: what the elements are loaded in, or None for what the rule picks.
        masked, seeded: pass `where=`, `init=`.
        dtype: of the elements.
        options: further keywords.
    """

    op: str
    name: str
    shape: tuple
    axis: Any
    policy: str
    layout: Any = None
    masked: bool = False
    seeded: bool = False
    dtype: str = "float32"
    options: dict = field(default_factory=dict)

    @property
    def axes(self):
        every = tuple(range(len(self.shape)))
        axes = every if self.axis is None else np.atleast_1d(self.axis)
        return tuple(int(a) for a in axes)

    @property
    def fibres(self):
        return tuple(s for a, s in enumerate(self.shape) if a not in self.axes)

    def operands(self):
        """Element leaves, seed leaves, and a mask of 32-bit integers."""
        found = [data(self.shape, self.dtype)]
        if self.name == "affine":
            # Products that stay normal numbers: XLA's CPU flushes the others to zero.
            factor = np.where(found[0] < 0, -0.5, 0.5) + 0.5 * np.tanh(found[0])
            factor = factor.astype(found[0].dtype)
            found = [factor, data(self.shape, self.dtype, 1)]
        if self.name == "farthest":
            found.append(data(self.shape, "int32", 1))
        if self.seeded:
            assert self.name in _SEEDABLE
            count = 2 if self.name == "affine" else 1
            seeds = [data(self.fibres, self.dtype, 2 + k) for k in range(count)]
            found += [s.reshape(self.fibres or (1,)) for s in seeds]
        if self.masked:
            mask = np.random.default_rng(7).random(self.shape) < 0.6
            mask[(0,) * (len(self.shape) - 1)] = False  # fibres without elements
            found.append(mask.astype(np.int32))
        return found

    @property
    def elements(self):
        return 2 if self.name in ("affine", "farthest") else 1

    def __call__(self, *values, policy=None):
        """The leaves of the call on these operands."""
        elements, rest = values[: self.elements], list(values[self.elements :])
        params = dict(self.options, policy=policy or self.policy)
        if self.masked:
            params["where"] = rest.pop() != 0
        if self.seeded:
            if not self.fibres:
                rest = [v.reshape(()) if v.shape else v for v in rest]
            params["init"] = tuple(rest) if len(rest) > 1 else rest[0]
        x = elements if self.elements > 1 else elements[0]
        run = jt.reduce if self.op == "reduce" else jt.scan
        return jax.tree.leaves(run(x, self.axis, REDUCERS[self.name], **params))

    def outs(self):
        """What the kernel writes: scalars fill 128 places."""
        specs = [targets.spec(v.shape, v.dtype) for v in self.operands()]
        found = jax.eval_shape(self.__call__, *specs)
        return tuple(targets.spec(v.shape or (128,), v.dtype) for v in found)

    def _load(self, ref, k):
        seeds = range(self.elements, self.elements + 2)
        if self.seeded and k in seeds and ref.shape != self.shape:
            if not self.fibres:
                return ref[0]
            return targets.load_tiled(ref, self.seed_layout())
        return targets.load_tiled(ref, self.layout)

    def seed_layout(self):
        """The elements' layout without the axes, or None."""
        from jaxtile.pallas_lowering.mosaic_gpu import _layouts

        if self.layout is None:
            return None
        concrete = self.layout.to_mgpu()
        return _layouts.public(_layouts.without(concrete, self.shape, self.axes))

    def body(self, *refs):
        """The kernel's body."""
        count = len(self.operands())
        values = [self._load(ref, k) for k, ref in enumerate(refs[:count])]
        for value, ref in zip(self(*values), refs[count:], strict=True):
            if value.shape:
                targets.store_tiled(ref, value)
            else:
                ref[...] = jnp.broadcast_to(value, ref.shape)

    def reference(self):
        """The leaves on the CPU; those of a policy that may regroup as `fixed_tree`."""
        policy = "fixed_tree" if self.regroups else self.policy
        with jax.default_device(jax.devices("cpu")[0]):
            run = jax.jit(lambda *v: self(*v, policy=policy))
            return [np.asarray(v) for v in run(*self.operands())]

    @property
    def regroups(self):
        policy = jt.policy.as_policy(self.policy)
        return policy.permits(jt.policy.Transform.REGROUP)

    def check(self, got, exact=True):
        """Compare with the reference: bits, or closely where the order is free."""
        for k, (a, b) in enumerate(zip(got, self.reference(), strict=True)):
            a = np.asarray(a)
            a = a if b.shape else a[0]
            assert a.dtype == b.dtype
            integers = b.dtype.kind in "iub"
            if (exact and not self.regroups) or integers:
                same = (a == b) | ((a != a) & (b != b))
                same &= np.signbit(a) == np.signbit(b) if not integers else True
            else:
                scale = np.abs(self.operands()[0].astype(np.float64)).sum()
                same = np.isclose(a, b, rtol=1e-4, atol=1e-6 * scale, equal_nan=True)
            bad = np.argwhere(~np.atleast_1d(same))
            assert not len(bad), (
                f"{self}: result {k} differs at {len(bad)} of {b.size} places, first "
                f"{bad[0]}: {np.atleast_1d(a)[tuple(bad[0])]!r} for "
                f"{np.atleast_1d(b)[tuple(bad[0])]!r}"
            )

    def __str__(self):
        parts = [self.op, self.name, str(self.shape), str(self.axis), self.policy]
        parts += [self.dtype] * (self.dtype != "float32")
        parts += ["mask"] * self.masked + ["seed"] * self.seeded
        parts += [f"{k}={v}" for k, v in self.options.items()]
        return " ".join(parts)


class Carried:
    """A recurrence over two blocks: the first one's last state seeds the second.

    Args:
        policy: the order.
        layout: of the blocks, or None.
    """

    shape = (64, 16)

    def __init__(self, policy, layout=None):
        self.policy, self.layout = policy, layout
        self.out = targets.spec((2, *self.shape))

    def operands(self):
        blocks = [
            Call("scan", "affine", self.shape, 1, self.policy).operands()
            for _ in range(2)
        ]
        return [np.stack([a, b[::-1]]) for a, b in zip(*blocks, strict=True)]

    def __call__(self, first, second):
        scan = functools.partial(
            jt.scan, axis=1, reducer=jt.affine, policy=self.policy, return_final=True
        )
        before, state = scan(first)
        after, _ = scan(second, init=state)
        return before, after

    def body(self, a_ref, b_ref, o_ref):
        blocks = [
            tuple(targets.load_tiled(r.at[k], self.layout) for r in (a_ref, b_ref))
            for k in (0, 1)
        ]
        for k, value in enumerate(self(*blocks)):
            targets.store_tiled(o_ref.at[k], value)

    def check(self, got):
        """Compare with the CPU, to the bit."""
        with jax.default_device(jax.devices("cpu")[0]):
            run = jax.jit(lambda a, b: jnp.stack(self((a[0], b[0]), (a[1], b[1]))))
            want = np.asarray(run(*self.operands()))
        wrong = got.view(np.uint32) != want.view(np.uint32)
        assert not wrong.any(), f"{wrong.sum()} of {wrong.size} differ"
