"""explain and supports: what runs where, and why not elsewhere.

Both ask the predicates that guard the backends' rules, so they cannot drift from
what the rules do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxtile import (
    _found,
    _jax_private,
    backends,
    blocks,
    casting,
    contraction,
    elementwise,
    exchange,
    formats,
    ordering,
    quantization,
    reduction,
    reindexing,
    summation,
)
from jaxtile._checks import arguments, choice, function
from jaxtile.pallas_lowering import NAMES

_PUBLIC: dict[str, Callable] = {
    "argsort": ordering.argsort,
    "bitcast": casting.bitcast,
    "cast": casting.cast,
    "decode": quantization.decode,
    "decode_blocks": blocks.decode_blocks,
    "einsum": summation.einsum,
    "gather": exchange.gather,
    "linear_recurrence": reduction.linear_recurrence,
    "map": elementwise.map,
    "matmul": contraction.matmul,
    "mma": contraction.mma,
    "pack": quantization.pack,
    "quantize": quantization.quantize,
    "quantize_blocks": blocks.quantize_blocks,
    "reduce": reduction.reduce,
    "reindex": reindexing.reindex,
    "scan": reduction.scan,
    "unpack": quantization.unpack,
    "scatter": exchange.scatter,
    "segment_reduce": exchange.segment_reduce,
    "sort": ordering.sort,
    "topk": ordering.topk,
}


@dataclass(frozen=True)
class Support:
    """Whether a backend lowers an op inside a kernel; true if it does.

    Args:
        reason: the sentence with which it refuses, or None.
        whole_array: why it does not run the call on whole arrays under jit, or None.
    """

    reason: str | None
    whole_array: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "yes" if self else f"no: {self.reason}"


def supports(op: str, backend: str, *operands: Any, **params: Any) -> Support:
    """Ask whether a backend lowers a call inside its kernels, and on whole arrays.

    Args:
        op: the op's public name, such as "reduce".
        backend: "triton", "mosaic_gpu" or "tpu".
        *operands: what the call takes by position; arrays may be
            `jax.ShapeDtypeStruct`s.
        **params: what the call takes by keyword.

    Returns:
        A `Support`, false with a `reason` where any part of the call is refused in a
        kernel; its `whole_array` is None where the backend has a kernel of its own for
        the call outside yours. What only the kernel shows (the register layout of a
        value) is not known here.

    Raises:
        TileValueError: no such op or backend.
        TileTypeError: the operands are not those of the call.
        TileError: the call itself is wrong, as it would be outside a kernel.

    Example:
        >>> import jax, jaxtile as jt
        >>> x = jax.ShapeDtypeStruct((8, 128), "float32")
        >>> bool(jt.supports("reduce", "tpu", x, 0, jt.add))
        True
        >>> half = jax.ShapeDtypeStruct((8, 128), "float16")
        >>> answer = jt.supports("reduce", "tpu", half, 0, jt.add)
        >>> print(answer.reason.split(";")[0])
        float16 is not computed with there
    """
    way_out = "support_table() shows them all."
    fn = _PUBLIC[choice("supports", "op", op, tuple(_PUBLIC), way_out)]
    choice("supports", "backend", backend, NAMES, way_out)
    arguments("supports", fn, operands, params)
    jaxpr = _jaxpr_of("supports", fn, operands, params)
    parts = list(_found.find(jaxpr))
    inside = (_refusal(found, backend) for found in parts)
    whole = (_whole_refusal(found, backend) for found in parts)
    return Support(*(next(filter(None, each), None) for each in (inside, whole)))


def _is_array(value):
    return isinstance(value, jax.ShapeDtypeStruct) or hasattr(value, "aval")


def _jaxpr_of(op, fn, args, params):
    """The jaxpr of a call in which only what looks like an array is an operand."""
    leaves, tree = jax.tree.flatten((args, params))
    places = [i for i, v in enumerate(leaves) if _is_array(v)]
    for i in places:
        if leaves[i].dtype.itemsize == 8:
            formats.require_enabled(leaves[i].dtype, op)

    def call(*arrays):
        given = list(leaves)
        for i, v in zip(places, arrays, strict=True):
            given[i] = v
        args, params = jax.tree.unflatten(tree, given)
        return fn(*args, **params)

    return jax.make_jaxpr(call)(*(leaves[i] for i in places)).jaxpr


def _refusal(found: _found.Found, backend: str) -> str | None:
    avals = [v.aval for v in found.eqn.invars]
    return backends.kernel_refusal(
        backend, found.eqn.primitive, *avals, **found.eqn.params
    )


def _whole_refusal(found: _found.Found, backend: str) -> str | None:
    avals = [v.aval for v in found.eqn.invars]
    return backends.whole_array_refusal(
        backend, found.eqn.primitive, *avals, **found.eqn.params
    )


@dataclass(frozen=True)
class Entry:
    """One tile op of a function.

    Args:
        op: its public name.
        operands: their formats and shapes.
        place: "array", or "in kernel: " and the backend or "interpret".
        implementation: what runs it; "refused" where its kernel's backend refuses, or
            the backend that was asked for.
        refusals: for every other backend, why it does not run it there.
        times: how often it runs, at least.
        bytes: moved to and from memory, at least, in all runs.
        flops: scalar operations, at least, in all runs.
        launches: how many kernels one run is; None for what is no kernel of its own.
    """

    op: str
    operands: tuple[str, ...]
    place: str
    implementation: str
    refusals: dict[str, str]
    times: int
    bytes: int
    flops: int
    launches: int | None = None

    def __str__(self) -> str:
        count = f" ({self.launches} kernels each)" if self.launches else ""
        head = (
            f"{self.op}({', '.join(self.operands)})  {self.place}\n"
            f"  runs as {self.implementation}, {self.times} x{count}; at least "
            f"{self.bytes} bytes, {self.flops} flops"
        )
        return "\n".join([head, *(f"  not {k}: {v}" for k, v in self.refusals.items())])


@dataclass(frozen=True)
class Report:
    """The tile ops of a function, printable.

    Args:
        entries: one `Entry` for each, in the order of the program.
    """

    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries)) or "no tile ops"

    def __iter__(self):
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def explain(
    fn: Callable[..., Any], *, platform: str | None = None
) -> Callable[..., Report]:
    """List a function's tile ops: what runs each, and why the others do not.

    On a mesh the answer is for the arrays as they are given; each device asks again for
    its own shards.

    Args:
        fn: any function that jax traces, jitted or not, with kernels inside or not.
        platform: where it is to run: "cpu", "cuda", "tpu" or another of jax's. None is
            where jit would run it.

    Returns:
        A function of fn's arguments, arrays or `jax.ShapeDtypeStruct`s, that traces fn
        without running it and gives a `Report`.

    Raises:
        TileTypeError: fn is no function; when called, an argument that overflows
            in jax's 32 bits while jax_enable_x64 is off.
        TileError: fn itself raises it when traced.

    Example:
        >>> import jax, jaxtile as jt
        >>> report = jt.explain(lambda x: jt.reduce(x, 0, jt.add))(
        ...     jax.ShapeDtypeStruct((4, 8), "float32"))
        >>> [(e.op, e.implementation, e.bytes, e.flops) for e in report]
        [('reduce', 'reference', 160, 32)]
    """

    way_out = "Write explain(fn)(*args), with fn's own arguments."
    function("explain", "a function", fn, way_out)

    def explained(*args: Any, **kwargs: Any) -> Report:
        jaxpr = _jaxpr_of("explain", fn, args, kwargs)
        where = platform or _jax_private.default_platform()
        every = _found.find(jaxpr, platform=where)
        return Report(tuple(_entry(found, where) for found in every))

    return explained


def _on_arrays(found: _found.Found, platform: str) -> tuple[str, dict[str, str]]:
    avals = [v.aval for v in found.eqn.invars]
    chosen, refusals = backends.decide(
        found.eqn.primitive, platform, *avals, **found.eqn.params
    )
    return "refused" if chosen in refusals else chosen, refusals


def _in_kernel(found: _found.Found) -> tuple[str, dict[str, str]]:
    chosen, refusals = backends.REFERENCE, {}
    for name in NAMES:
        reason = _refusal(found, name)
        if name == found.place:
            chosen = name if reason is None else "refused"
        if reason is not None:
            refusals[name] = reason
        elif name != chosen:
            refusals[name] = "the kernel is another backend's"
    if found.place == _found.UNDECIDED:
        chosen = "refused"
        refusals["undecided"] = "no backend compiles this pallas_call on this machine"
    return chosen, refusals


def _entry(found: _found.Found, platform: str) -> Entry:
    in_kernel = found.place != _found.ARRAY
    if in_kernel:
        chosen, refusals = _in_kernel(found)
    else:
        chosen, refusals = _on_arrays(found, platform)
    own = not in_kernel and chosen in NAMES
    avals = [v.aval for v in found.eqn.invars]
    return Entry(
        op=found.op,
        operands=tuple(a.str_short(short_dtypes=True) for a in avals),
        place=f"in kernel: {found.place}" if in_kernel else found.place,
        implementation=chosen,
        refusals=refusals,
        times=found.times,
        bytes=_found.bytes_moved(found),
        flops=_found.scalar_ops(found),
        launches=_found.launches(found, chosen) if own else None,
    )
