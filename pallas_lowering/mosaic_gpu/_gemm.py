"""One launch of matrix products: a persistent grid of CTAs with two warpgroups each.

A third warpgroup copies blocks of both operands ahead through shared memory; the two
compute their tiles on the tensor cores. `promote` ends the tensor cores' own sums every
block of K and adds them as floats. The seed and the result go through shared memory in
strips, and the epilogue is thread code between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtile.pallas_lowering.mosaic_gpu._lanes import Form
from jaxtile.pallas_lowering.mosaic_gpu._region import Region

_SLOTS = 2
_MEMORY_REGISTERS = 40
_ROWS = 64
_WGMMA = plgpu.Layout.WGMMA
# Before jax 0.11 one is private, and the other has more arguments.
_Accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_load: Any = plgpu.load


@dataclass(frozen=True)
class Plan:
    """How a product is cut.

    Args:
        tile: (m, n) of a warpgroup.
        along_n: the warpgroups lie beside each other, else one above the other.
        k: of a block.
        steps: blocks in flight.
        strip: columns of an epilogue's strip.
        promote: each block's sum is added as floats.
        width: tiles of a band that CTAs walk together, for the second-level cache.
        groups: warpgroups that multiply.
    """

    tile: tuple[int, int]
    along_n: bool
    k: int
    steps: int
    strip: int
    promote: bool = False
    width: int = 8
    groups: int = 2

    @property
    def block(self) -> tuple[int, int]:
        """(m, n) of a CTA."""
        m, n = self.tile
        return (m, n * self.groups) if self.along_n else (m * self.groups, n)

    def part(self, group) -> tuple:
        """A warpgroup's rows and columns of the CTA's block."""
        m, n = self.tile
        if self.along_n:
            return slice(None), pl.ds(group * n, n)
        return pl.ds(group * m, m), slice(None)


@dataclass(frozen=True)
class Product:
    """What is multiplied.

    Args:
        batch, m, n, k: sizes.
        a_minor_k, b_minor_k: K is the last axis of the operand.
        pairs: (part of a, part of b) of each product, in the order of their sum.
        first_high: the first pair whose sum may be infinite on its own; what the pairs
            before it gave is dropped there where it is not finite.
        seeded: there is a seed.
        out: dtype of the result.
    """

    batch: int
    m: int
    n: int
    k: int
    a_minor_k: bool
    b_minor_k: bool
    pairs: tuple[tuple[int, int], ...]
    first_high: int
    seeded: bool
    out: Any


def _transforms(columns: int, dtype):
    item = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * item * 8)
    return (
        plgpu.TilingTransform((8, swizzle // item)),
        plgpu.SwizzleTransform(swizzle),
    )


def _picked(numbers: Sequence[int], index):
    """numbers[index] of a traced index."""
    found = jnp.int32(numbers[0])
    for k, number in enumerate(numbers[1:], 1):
        if number != numbers[k - 1]:
            found = jnp.where(index >= k, jnp.int32(number), found)
    return found


def _finite(v):
    """Zero in place of what is infinite or NaN."""
    return jnp.where(jnp.abs(v) < jnp.inf, v, jnp.zeros_like(v))


class _Kernel:
    """The body of the launch.

    Args:
        product: what is multiplied.
        plan: how.
        dtypes: of the operands and the seed.
        finish: thread code of the epilogue, `(accumulator, seed or None) -> result`.
    """

    def __init__(self, product: Product, plan: Plan, dtypes, finish: Region):
        self.product, self.plan, self.finish = product, plan, finish
        self.dtype, self.seed_dtype = dtypes
        self.k_blocks = -(-product.k // plan.k)
        m, n = plan.block
        self.grid = (-(-product.m // m), -(-product.n // n))

    def _specs(self, where):
        plan, product = self.plan, self.product
        m, n = plan.block
        left = (m, plan.k) if product.a_minor_k else (plan.k, m)
        right = (n, plan.k) if product.b_minor_k else (plan.k, n)
        lead = (pl.squeezed, pl.squeezed)

        def index(side, minor_k, parts):
            def block(step):
                pair, k = lax.div(step, self.k_blocks), lax.rem(step, self.k_blocks)
                batch, at = where[0], where[1 + side]
                spot = (at, k) if minor_k else (k, at)
                return (_picked(parts, pair), batch, *spot)

            return block

        sides = zip(*product.pairs, strict=True)
        kinds = (product.a_minor_k, product.b_minor_k)
        return [
            plgpu.BlockSpec(
                (*lead, *shape),
                index(side, minor_k, parts),
                transforms=_transforms(shape[1], self.dtype),
                memory_space=plgpu.SMEM,
            )
            for side, (shape, minor_k, parts) in enumerate(
                zip((left, right), kinds, sides, strict=True)
            )
        ]

    def _pipeline(self, body, context, where=(0, 0, 0)):
        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(len(self.product.pairs) * self.k_blocks,),
            memory_registers=_MEMORY_REGISTERS,
            in_specs=self._specs(where),
            wg_axis="group",
            num_compute_wgs=self.plan.groups,
            max_concurrent_steps=self.plan.steps,
            compute_context=context,
        )

    def __call__(self, *refs):
        plan, product = self.plan, self.product
        a, b, *seed, out = refs
        slots = (plan.groups, _SLOTS, _ROWS, plan.strip)
        nothing = lambda *_, **__: None  # noqa: E731
        scratch: dict[str, Any] = dict(
            allocations=self._pipeline(nothing, nothing).get_allocations(a, b),
            shown=plgpu.SMEM(
                slots, product.out, transforms=_transforms(plan.strip, product.out)
            ),
        )
        if seed:
            scratch["seeds"] = plgpu.SMEM(
                slots,
                self.seed_dtype,
                transforms=_transforms(plan.strip, self.seed_dtype),
            )
            scratch["arrived"] = plgpu.Barrier(num_barriers=plan.groups * _SLOTS)

        def scope(allocations, shown, seeds=None, arrived=None):
            rows, columns = self.grid

            def tile(info):
                batch, place = lax.div(info.index[0], rows * columns), info.index[0]
                place = lax.rem(place, jnp.int32(rows * columns))
                at = plgpu.planar_snake(place, (rows, columns), 1, plan.width)
                where = (batch, *at)
                strips = _Strips(self, where, out, seed, shown, seeds, arrived)
                self._tile(where, a, b, allocations, strips)

            total = product.batch * rows * columns
            plgpu.nd_loop((total,), collective_axes="cta")(tile)

        pl.run_scoped(scope, **scratch, collective_axes="group")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _tile(self, where, a, b, allocations, strips):
        plan, product = self.plan, self.product
        rows, columns = plan.part(lax.axis_index("group"))

        def multiply(acc, left, right):
            left = left.at[rows] if product.a_minor_k else left.at[:, rows].T
            right = right.at[columns].T if product.b_minor_k else right.at[:, columns]
            plgpu.wgmma(acc, left, right)

        def step(index, left, right, acc):
            if not plan.promote:
                multiply(acc, left, right)
                plgpu.wgmma_wait(0)
                return acc

            def fresh(part):
                multiply(part, left, right)
                return part[...]

            part = pl.run_scoped(fresh, _Accumulator(plan.tile, jnp.float32))
            if product.first_high:
                high = index[0] == product.first_high * self.k_blocks
                acc = lax.cond(high, _finite, lambda v: v, acc)
            return acc + part

        def context(evaluate):
            if plan.promote:
                zero = jnp.zeros(plan.tile, jnp.float32)
                strips.write(evaluate(plgpu.layout_cast(zero, _WGMMA)))
                return

            def whole(acc):
                evaluate(acc)
                strips.write(acc[...])

            pl.run_scoped(whole, _Accumulator(plan.tile, jnp.float32))

        self._pipeline(step, context, where)(a, b, allocations=allocations)


class _Strips:
    """A warpgroup's tile on its way out, strip by strip, the next seed on its way in."""

    def __init__(self, kernel: _Kernel, where, out, seed, shown, seeds, arrived):
        self.kernel, self.out, self.seed = kernel, out, seed[0] if seed else None
        self.shown, self.seeds, self.arrived = shown, seeds, arrived
        self.group = lax.axis_index("group")
        plan = kernel.plan
        (m, n), (bm, bn) = plan.tile, plan.block
        down, right = (0, self.group * n) if plan.along_n else (self.group * m, 0)
        self.batch = where[0]
        self.row, self.column = where[1] * bm + down, where[2] * bn + right
        self.spots = [
            (i, j) for i in range(0, m, _ROWS) for j in range(0, n, plan.strip)
        ]

    def _at(self, ref, spot):
        rows = pl.ds(self.row + spot[0], _ROWS)
        columns = pl.ds(self.column + spot[1], self.kernel.plan.strip)
        return ref.at[self.batch, rows, columns]

    def _fetch(self, k):
        if self.seed is None or k >= len(self.spots):
            return
        slot = k % _SLOTS
        plgpu.copy_gmem_to_smem(
            self._at(self.seed, self.spots[k]),
            self.seeds.at[self.group, slot],
            self.arrived.at[self.group * _SLOTS + slot],
        )

    def write(self, acc):
        """Finish the whole tile."""
        strip = self.kernel.plan.strip
        self._fetch(0)
        for k, (i, j) in enumerate(self.spots):
            self._fetch(k + 1)
            slot, given = k % _SLOTS, [acc[i : i + _ROWS, j : j + strip]]
            plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
            if self.seed is not None:
                plgpu.barrier_wait(self.arrived.at[self.group * _SLOTS + slot])
                given.append(_load(self.seeds.at[self.group, slot], layout=_WGMMA))
            self.shown[self.group, slot] = self._finished(given)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self.shown.at[self.group, slot], self._at(self.out, (i, j))
            )

    def _finished(self, given):
        shape = (_ROWS, self.kernel.plan.strip)
        out = np.dtype(self.kernel.product.out)
        inline: Any = plgpu.inline_mgpu(
            arg_types=(_WGMMA,) * len(given),
            return_type=plgpu.ShapeDtypeStruct(shape, out, _WGMMA),
        )

        def code(_, *values):
            forms = [Form(v.layout, shape) for v in values]
            threads = [f.explode(v).flat for f, v in zip(forms, values, strict=True)]
            found = [self.kernel.finish(*s)[0] for s in zip(*threads, strict=True)]
            return forms[0].implode(found, utils.is_signed(out))

        return inline(code)(*given)


def multiply(
    a: jax.Array,
    b: jax.Array,
    c: jax.Array | None,
    product: Product,
    plan: Plan,
    finish: Callable,
    multiprocessors: int,
) -> jax.Array:
    """Run the launch.

    Args:
        a: (parts, batch, m, k), or with k before m.
        b: (parts, batch, k, n), or with n before k.
        c: (batch, m, n), or None.
        product, plan: what, and how.
        finish: the epilogue on scalars, `(accumulator, seed or nothing) -> [result]`.
        multiprocessors: of the device.

    Returns:
        The result, (batch, m, n).
    """
    seed = () if c is None else (c,)
    region = Region(finish, [jnp.float32, *(v.dtype for v in seed)])
    dtypes = (a.dtype, None if c is None else c.dtype)
    body = _Kernel(product, plan, dtypes, region)
    total = product.batch * math.prod(body.grid)
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (product.batch, product.m, product.n), product.out
        ),
        grid=(min(multiprocessors, total),),
        grid_names=("cta",),
        num_threads=plan.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    return call(a, b, *seed)
