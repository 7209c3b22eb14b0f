"""kernel: a function of a nest, operands and results, called on arrays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtile import backends
from jaxtile._checks import arguments, as_array, flag, function, integer
from jaxtile._operators import is_tile
from jaxtile.errors import TileTypeError, TileValueError, message
from jaxtile.kernels import derivative, meshes, realisations
from jaxtile.primitives._define import REFERENCE
from jaxtile.reducers import value_key
from jaxtile.tile import Tile, tile


class Kernel:
    """A kernel, called with its operands. `jaxtile.kernel` makes it.

    Args:
        body: `(nest, *operands, *results, **config) -> None`.
        out, tuned: what `jaxtile.kernel` takes.
        name: for messages.
    """

    def __init__(
        self, body: Callable, out: Any, name: str, tuned: Mapping | None = None
    ):
        for known in _mapping("kernel", "tuned", {} if tuned is None else tuned):
            realisations.require_name("kernel", known)
        functools.update_wrapper(self, body)
        self.body, self.out, self.name, self.tuned = body, out, name, dict(tuned or {})
        self._rule: derivative.Rule | None = None
        self._jitted = jax.jit(self._call, static_argnums=(0, 1, 2))

    def __call__(
        self, *operands: Any, implementation: str | None = None, **config: Any
    ) -> Any:
        """Run the kernel.

        Args:
            *operands: arrays, tiles or numbers.
            implementation: "reference" runs it as plain jax, vectorised over the
                parallel nests; "triton" as a Pallas kernel on CUDA, "interpret" as the
                same kernel in Pallas' interpreter, "mosaic_gpu" as a kernel on CUDA from
                Hopper on, of elementwise ops, reductions, scans and loops, "tpu" as one
                whose grid brings blocks. None is the one that the kernel is tuned for on
                the platform and the call, else plain jax. Derivatives are those of plain
                jax, or of `defvjp`.
            **config: the body's keyword arguments, such as block sizes; and for launches
                on CUDA num_warps, of Triton num_stages and of Mosaic GPU num_held, the
                last blocks of a pipeline that stay in registers for a next pipeline over
                the same ones. They change no result.

        Returns:
            The results, in the structure of out.

        Raises:
            TileError: an operand or a configuration that does not fit; what the body
                raises; an implementation that refuses.
        """
        name = realisations.asked(self.name, implementation)
        given = [v if is_tile(v) else as_array(self.name, v) for v in operands]
        return self._jitted(name, _Config(self.name, config), self._rule, *given)

    def defvjp(
        self, fwd: Callable, bwd: Callable, *, forward_mode: bool = False
    ) -> None:
        """Give the kernel a derivative of its own, as `jax.custom_vjp` takes it.

        Both are given the call's keyword arguments too; a function also `implementation`,
        if it takes that. A kernel among them runs as the call does, and takes one by one
        the arrays and tiles that a function would be given in pytrees: `bwd` those of the
        residuals, then the cotangents, without those of integer results, which say nothing.

        Args:
            fwd: a function or a kernel, `(*operands) -> (results, residuals)`.
            bwd: a function or a kernel, `(residuals, cotangents) -> cotangents`, a tuple
                with one for each operand: None for integers, and where it is zero. That
                of a single operand needs no tuple.
            forward_mode: the rule is the derivative of the body itself, so that forward
                mode, and with it second derivatives, may be those of plain jax.

        Raises:
            TileTypeError: they are no functions; when differentiated, keyword arguments
                or a structure that does not fit.
            TileShapeError: when differentiated, another shape or dtype.
            NoDerivativeError: forward mode, without forward_mode.

        Example:
            >>> import jax, jax.numpy as jnp, jaxtile as jt
            >>> @jt.kernel(out=lambda x: x)
            ... def sin(nest, x, y):
            ...     i = nest.parallel(x.shape[0], 2)
            ...     y.tile(i).store(jt.sin(x.tile(i).load()))
            >>> @jt.kernel(out=lambda x, dy: x)
            ... def backward(nest, x, dy, dx):
            ...     i = nest.parallel(x.shape[0], 2)
            ...     dx.tile(i).store(dy.tile(i).load() * jt.cos(x.tile(i).load()))
            >>> sin.defvjp(lambda x: (sin(x), x), backward)
            >>> print(jax.grad(lambda x: sin(x).sum())(jnp.zeros(3)))
            [1. 1. 1.]
        """
        op = f"{self.name}.defvjp"
        for what, fn in (("fwd", fwd), ("bwd", bwd)):
            function(op, what, fn, "Pass two functions or kernels.")
        forward_mode = flag(op, "forward_mode", forward_mode)
        rules = _settled(op, fwd), _settled(op, bwd)
        self._rule = derivative.Rule(op, *rules, forward_mode)

    def _call(
        self,
        implementation: str | None,
        config: _Config,
        rule: derivative.Rule | None,
        *operands: Any,
    ) -> Any:
        structs = [_struct_of(v) for v in operands]
        out = self.out
        if callable(out):
            out = out(*arguments(self.name, out, structs, {}))
        leaves, tree = jax.tree.flatten(out, is_leaf=is_tile)
        results = [self._result(v) for v in leaves]
        names = self.tuned if implementation is None else (implementation,)
        calls = {
            name: self._configured(name, config.values, structs, len(results))
            for name in (REFERENCE, *names)
        }

        def run(*operands):
            arrays = realisations.run(implementation, calls, _pairs(operands), results)
            found = [
                v if dims is None else Tile(v, dims)
                for v, (_, dims) in zip(arrays, results, strict=True)
            ]
            return jax.tree.unflatten(tree, found)

        def whole(*operands):
            if rule is None:
                return run(*operands)
            return rule.attach(run, (implementation, config.values), operands, out)

        plainly = calls[REFERENCE]
        return meshes.on_explicit_axes(
            whole, plainly, operands, _pairs(operands), results
        )

    def _configured(
        self, name: str, config: dict, structs: list, results: int
    ) -> realisations.Call:
        """The body with the keyword arguments of a realisation."""
        tuned = self.tuned.get(name, {})
        if callable(tuned):
            tuned = tuned(*arguments(self.name, tuned, structs, {}))
        every = {**_mapping(self.name, f"tuned[{name!r}]", tuned), **config}
        sizes = {k: every.pop(k, None) for k in LAUNCH}
        launch = {k: _size(self.name, k, v) for k, v in sizes.items() if v is not None}
        _require_takes(self.name, self.body, len(structs), results, every)
        body = functools.partial(self.body, **every)
        return realisations.Call(self.name, body, launch)

    def _result(self, leaf: Any) -> tuple[Any, Any]:
        """The shape and dtype, and the dims or None, of a leaf of out."""
        array = leaf.array if is_tile(leaf) else leaf
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TileTypeError(
                message(
                    self.name,
                    expected="out a ShapeDtypeStruct, a pytree of them, or a function of "
                    "the operands' that gives one",
                    got=repr(leaf),
                    way_out="Write out=lambda x: x for a result like the first operand.",
                )
            )
        struct = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return struct, leaf.dims if is_tile(leaf) else None

    def __repr__(self) -> str:
        return f"kernel {self.name}"


def _settled(op: str, fn: Callable) -> Callable:
    """`fn` as a function that takes the call's implementation and configuration first."""

    def kernel(implementation, config, *args):
        return fn(*derivative.taken(args), implementation=implementation, **config)

    def plain(implementation, config, *args):
        parameters = inspect.signature(fn).parameters.values()
        if any(
            p.name == "implementation" or p.kind is p.VAR_KEYWORD for p in parameters
        ):
            config = {**config, "implementation": implementation}
        arguments(op, fn, args, config)
        if implementation != REFERENCE:
            return fn(*args, **config)
        with backends.use_implementation(REFERENCE):
            return fn(*args, **config)

    return kernel if isinstance(fn, Kernel) else plain


def _pairs(operands: Sequence) -> list[tuple[Any, Any]]:
    """The array, and the dims or None, of each operand."""
    return [(v.array, v.dims) if is_tile(v) else (v, None) for v in operands]


def _struct_of(value: Any) -> Any:
    array = value.array if is_tile(value) else value
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return Tile(struct, value.dims) if is_tile(value) else struct


class _Config:
    """Keyword arguments that hash by value, as a static argument of jit must."""

    def __init__(self, op: str, values: dict[str, Any]):
        self.values = values
        self._key: Any = None
        for name, value in values.items():
            try:
                hash(value)
            except TypeError as error:
                raise TileTypeError(
                    message(
                        op,
                        expected=f"{name} a value known while tracing, that hashes",
                        got=f"a {type(value).__name__}",
                        way_out="Pass a number, a string or a tuple; an array is an "
                        "operand.",
                    )
                ) from error
        self._key = value_key(values)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Config) and self._key == other._key


def _mapping(op: str, what: str, value: Any) -> Mapping:
    if not isinstance(value, Mapping):
        raise TileTypeError(
            message(
                op,
                expected=f"{what} a mapping of keyword arguments, or a function to one",
                got=repr(value),
                way_out='Write tuned={"triton": {"block": 64}}.',
            )
        )
    return value


def _require_takes(
    op: str, body: Callable, operands: int, results: int, config: Mapping
) -> None:
    """Refuse a call that the body's parameters do not fit."""
    try:
        inspect.signature(body).bind(*[None] * (1 + operands + results), **config)
    except TypeError as error:
        keywords = f" and the keywords {', '.join(config)}" if config else ""
        raise TileTypeError(
            message(
                op,
                expected=f"a body that takes a nest, {operands} operands, {results} "
                f"results{keywords}",
                got=f"{op}{inspect.signature(body)}: {str(error).removeprefix('got ')}",
                way_out="Pass an operand for each that the body names, and keywords of "
                "its own; out= says how many results there are.",
            )
        ) from error


def _size(op: str, name: str, value: Any) -> int:
    """A size of the launch."""
    way_out = "Leave it out for what suits the platform."
    value = integer(op, f"{name} an integer", value, way_out)
    if value < 1 or (name == "num_warps" and value & (value - 1)):
        least = "a power of two" if name == "num_warps" else "at least 1"
        raise TileValueError(
            message(op, expected=f"{name} {least}", got=str(value), way_out=way_out)
        )
    return value


# Keyword arguments of the launch, not of the body.
LAUNCH = ("num_warps", "num_stages", "num_held")


def kernel(
    *, out: Any, tuned: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Kernel]:
    """A kernel, written once as a function of a nest, operands and results.

    The body makes nests, loads tiles of its operands and stores tiles of its results.
    It is traced once for each set of shapes, as one instance; all instances of its
    parallel nests then run side by side. Ragged edges are loaded padded, skipped by
    reductions and contractions along them, and never stored. A body stores every result;
    elements that it stores in no instance have no value.

    Args:
        out: what it returns, a `jax.ShapeDtypeStruct` or a pytree of them, or a function
            from the operands' to that; a `Tile` of one gives a tile.
        tuned: by implementation, the keyword arguments that it is called with where the
            caller gives none, or a function from the operands' structs to them. Where
            nobody asks for an implementation, the first of these that serves the platform
            and takes the call runs the kernel.
    Returns:
        A decorator of `(nest, *operands, *results, **config) -> None` that gives a
        `Kernel`.

    Raises:
        TileTypeError: the body is no function.

    Example:
        >>> import jax, jax.numpy as jnp, jaxtile as jt
        >>> @jt.kernel(out=lambda x: x)
        ... def softmax(nest, x, y, *, block=2):
        ...     rows, cols = nest.parallel(x.shape[0], block), jt.Dim("cols")
        ...     t = x.tile(rows, cols).load()
        ...     e = jt.exp(t - jt.reduce(t, cols, jt.maximum))
        ...     y.tile(rows, cols).store(e / jt.reduce(e, cols, jt.add))
        >>> print(softmax(jnp.zeros((3, 4))))
        [[0.25 0.25 0.25 0.25]
         [0.25 0.25 0.25 0.25]
         [0.25 0.25 0.25 0.25]]
    """

    def decorate(body: Callable[..., None]) -> Kernel:
        function("kernel", "a body", body, "Decorate def body(nest, x, y).")
        return Kernel(body, out, getattr(body, "__name__", "kernel"), tuned)

    return decorate


view = tile
