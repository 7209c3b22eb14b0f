"""Every error that reduce, scan and linear_recurrence document, by its sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import PolicyError, TileShapeError, TileTypeError, TileValueError

_OPS = pytest.mark.parametrize("op", [jt.reduce, jt.scan])
_X = np.ones((2, 3), np.float32)


@_OPS
@pytest.mark.parametrize(
    ("kwargs", "error", "sentence"),
    [
        (dict(axis=2), TileShapeError, r"expected an axis in \[-2, 2\); got 2"),
        (dict(axis=-3), TileShapeError, r"expected an axis in \[-2, 2\); got -3"),
        (dict(axis=1.0), TileTypeError, "expected an integer axis or a Dim; got 1.0"),
        (dict(axis="x"), TileTypeError, "expected an integer axis or a Dim; got 'x'"),
        (dict(axis=jt.Dim("x")), TileShapeError, "expected one of the tile's dims"),
        (dict(reducer=jnp.add), TileTypeError, "expected a Reducer; got"),
        (dict(reducer="add"), TileTypeError, "expected a Reducer; got 'add'"),
        (dict(where=_X), TileTypeError, "expected a bool mask; got float32"),
        (dict(where=np.ones(2, bool)), TileShapeError, "a mask that broadcasts to"),
        (
            dict(init=np.ones(5, np.float32)),
            TileShapeError,
            r"init that broadcasts to \(2,\)",
        ),
        (
            dict(init=1j),
            TileTypeError,
            "expected arrays, tiles or numbers; got complex",
        ),
        (dict(init=(1.0, 2.0)), TileTypeError, "expected init like the state"),
        (dict(acc_dtype="float64"), TileTypeError, "at most 32 bits while jax_enable"),
        (dict(out_dtype="int64"), TileTypeError, "at most 32 bits while jax_enable"),
        (dict(out_dtype="float8_e5m2"), TileTypeError, "an arithmetic format"),
        (dict(acc_dtype="float8_e5m2"), TileTypeError, "an arithmetic format"),
        (dict(axis=True), TileTypeError, "expected an integer axis or a Dim; got True"),
        (dict(axis=np.arange(2)), TileTypeError, "expected an integer axis or a Dim"),
        (dict(init="a"), TileTypeError, "expected arrays, tiles or numbers; got str"),
        (dict(init={}), TileTypeError, "expected init like the state, float32; got {}"),
        (
            dict(init={"a": 1.0}),
            TileTypeError,
            "like the state, float32; got {a: 1.0",
        ),
        (dict(out_dtype=()), TileTypeError, r"out_dtype one dtype, or like the result"),
        (
            dict(out_dtype=["float16"]),
            TileTypeError,
            "out_dtype one dtype, or like the r",
        ),
        (
            dict(acc_dtype=[]),
            TileTypeError,
            r"expected one of float16, .*got dtype \[\]",
        ),
        (dict(acc_dtype=3), TileTypeError, "expected one of float16, .*got dtype 3"),
        (dict(implementation=[]), TileValueError, r"implementation in .*got \[\]"),
        (
            dict(implementation=""),
            TileValueError,
            "expected implementation in .*got ''",
        ),
        (dict(implementation="cuda"), TileValueError, "expected implementation in"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_arguments(op, kwargs, error, sentence):
    params = dict(axis=1, reducer=jt.add) | kwargs
    with pytest.raises(error, match=f"^{op.__name__}: .*{sentence}"):
        op(jnp.asarray(_X), params.pop("axis"), params.pop("reducer"), **params)


@_OPS
@pytest.mark.parametrize("name", ["triton", "mosaic_gpu", "tpu"])
def test_an_implementation_that_refuses(op, name):
    with pytest.raises(
        jt.errors.UnsupportedOnBackend, match=f"implementation='{name}': .*way|Use impl"
    ):
        op(jnp.asarray(_X), 1, jt.add, implementation=name)


@_OPS
def test_elements(op):
    for x, error, sentence in [
        ((), TileTypeError, "expected at least one array; got none"),
        (object(), TileTypeError, "expected arrays, tiles or numbers; got object"),
        ((_X, _X[:1]), TileShapeError, r"element leaves of one shape, \(2, 3\)"),
        (jnp.ones(3, jnp.complex64), TileTypeError, "expected one of float16"),
        (jnp.ones(3, jnp.float8_e4m3fn), TileTypeError, "an arithmetic format"),
        (jnp.ones(3, jnp.int4), TileTypeError, "an arithmetic format"),
    ]:
        with pytest.raises(error, match=f"^{op.__name__}: .*{sentence}"):
            op(x, 0, jt.add)


@_OPS
def test_a_pytree_that_the_reducer_does_not_take(op):
    with pytest.raises(
        TileTypeError, match=r"expected affine's lift to take \(float32\)"
    ):
        op(jnp.asarray(_X), 1, jt.affine, policy="fold_left")
    with pytest.raises(TileTypeError, match="expected add's (lift|merge) to take"):
        op((_X, _X), 1, jt.add, policy="fold_left")


@_OPS
@pytest.mark.parametrize(
    ("merge", "got"),
    [
        (lambda a, b: (a, b), r"\(float32, float32\)"),
        (lambda a, b: a > b, "bool"),
        (lambda a, b: (a + b).astype(jnp.float16), "float16"),
    ],
)
def test_a_merge_that_changes_the_state(op, merge, got):
    reducer = jt.Reducer(merge=merge, name="odd")
    sentence = "expected odd's merge to return a state like its operands.*got.*"
    with pytest.raises(TileTypeError, match=sentence + got):
        op(jnp.asarray(_X), 1, reducer, policy="fold_left")


@pytest.mark.parametrize(
    ("op", "name"),
    [(jt.reduce, "keepdims"), (jt.scan, "exclusive"), (jt.scan, "return_final")],
)
def test_flags_are_bools(op, name):
    for value in ("yes", 2, 0, None, np.ones(3, bool)):
        with pytest.raises(
            TileTypeError, match=f"^{op.__name__}: .*{name} to be True or"
        ):
            op(jnp.asarray(_X), 0, jt.add, **{name: value})
    traced = jax.jit(lambda x, flag: op(x, 0, jt.add, **{name: flag}))
    with pytest.raises(
        TileTypeError, match=f"{name} to be True or.*got a traced value"
    ):
        traced(_X, True)
    np.testing.assert_array_equal(
        jax.tree.leaves(op(_X, 0, jt.add, **{name: np.bool_(True)}))[0],
        jax.tree.leaves(op(_X, 0, jt.add, **{name: True}))[0],
    )


@_OPS
def test_an_axis_that_is_traced(op):
    with pytest.raises(
        TileTypeError, match="an integer axis or a Dim; got a traced val"
    ):
        jax.jit(lambda x, axis: op(x, axis, jt.add))(_X, 1)


def test_a_seed_in_the_structure_of_another_state():
    with pytest.raises(TileTypeError, match=r"like the state, \(float32, int32\)"):
        jt.reduce(_X, 0, jt.argmax, init={"index": 0, "value": 1.0})
    value, index = jt.reduce(_X, 0, jt.argmax, init=[2.0, 7])
    assert (float(value[0]), int(index[0])) == (2.0, 7)
    for narrow in ((jnp.float16,), (jnp.float16, None, None), {"a": None}):
        with pytest.raises(TileTypeError, match=r"like the result, \(float32, int32\)"):
            jt.reduce(_X, 0, jt.argmax, out_dtype=narrow)
    value, index = jt.reduce(_X, 0, jt.argmax, out_dtype=(jnp.float16, None))
    assert (value.dtype, index.dtype) == (jnp.float16, jnp.int32)


def test_reduce_axes():
    x = jnp.ones((2, 3))
    for axes in ((0, 0), (0, -2), [1, 1]):
        with pytest.raises(TileShapeError, match="reduce: expected each axis once"):
            jt.reduce(x, axes, jt.add)


def test_reduce_of_nothing_names_the_axis():
    for reducer in (jt.maximum, jt.minimum, jt.argmax, jt.first):
        with pytest.raises(
            TileShapeError, match=r"at least one element along axes \(1,\) for .*Pass i"
        ):
            jt.reduce(jnp.zeros((2, 0)), 1, reducer, policy="ordered_tree")


@pytest.mark.parametrize("axis", [None, (0,), [0, 1]])
def test_scan_takes_one_axis(axis):
    with pytest.raises(TileTypeError, match="scan: expected one axis; got"):
        jt.scan(jnp.ones((2, 3)), axis, jt.add)


@pytest.mark.parametrize("direction", ["backward", None, "PREFIX", True])
def test_scan_direction(direction):
    with pytest.raises(TileValueError, match="scan: expected direction in"):
        jt.scan(jnp.ones(3), 0, jt.add, direction=direction)


def test_scan_of_nothing():
    sentence = "scan: expected init= for the prefix of nothing: .* has no identity"
    for reducer in (jt.argmax, jt.first):
        with pytest.raises(TileShapeError, match=sentence):
            jt.scan(jnp.ones(3), 0, reducer, exclusive=True)
        with pytest.raises(TileShapeError, match=sentence):
            jt.scan(jnp.ones(0), 0, reducer, return_final=True)
    seed = (jnp.float32(-1), jnp.int32(7))
    value, index = jt.scan(jnp.ones(2), 0, jt.argmax, exclusive=True, init=seed)
    np.testing.assert_array_equal(index, [7, 0])


def test_errors_are_raised_while_tracing():
    run = jax.jit(lambda x: jt.reduce(x, 1, jt.maximum))
    with pytest.raises(TileShapeError, match="at least one element"):
        run.lower(jax.ShapeDtypeStruct((2, 0), jnp.float32))


def test_errors_inherit_what_a_caller_would_catch():
    for error, builtin in [
        (TileTypeError, TypeError),
        (TileShapeError, ValueError),
        (TileValueError, ValueError),
        (jt.errors.ContractError, ValueError),
        (jt.errors.PolicyError, ValueError),
        (jt.errors.UnsupportedOnBackend, NotImplementedError),
        (jt.errors.NoDerivativeError, NotImplementedError),
    ]:
        assert issubclass(error, (jt.errors.TileError, builtin))
        assert issubclass(error, builtin)


def test_linear_recurrence_shapes():
    a = jnp.ones((2, 3))
    with pytest.raises((TileShapeError, TileTypeError), match="linear_recurrence|scan"):
        jt.linear_recurrence(a, jnp.ones((2, 4)), 1)
    with pytest.raises(TileShapeError, match="init that broadcasts"):
        jt.linear_recurrence(a, a, 1, jnp.ones(5))


def test_linear_recurrence_operands():
    x, ints, bools = jnp.ones(3), jnp.arange(3), jnp.ones(3, bool)
    for a, b, sentence in [
        (None, x, "expected arrays, tiles or numbers; got NoneType"),
        (x, "a", "expected arrays, tiles or numbers; got str"),
        (x, {"a": x}, "expected arrays, tiles or numbers; got dict"),
        ([1.0], x, "expected arrays, tiles or numbers; got list"),
        (ints, x, "a and b both floats, or both integers; got a int32 and b float32"),
        (x, ints, "a and b both floats, or both integers; got a float32 and b int32"),
        (0.5, ints, "both floats, or both integers; got a float32 and b int32"),
        (bools, bools, "both floats, or both integers; got a bool and b bool"),
        (True, x, "both floats, or both integers; got a bool and b float32"),
        (x, jnp.ones(4), "shapes that broadcast"),
    ]:
        with pytest.raises((TileTypeError, TileShapeError), match=sentence) as caught:
            jt.linear_recurrence(a, b, 0)
        assert str(caught.value).startswith("linear_recurrence: ")
    for h0, sentence in [
        ("a", "linear_recurrence: expected arrays, tiles or numbers; got str"),
        ((1.0,), "linear_recurrence: expected arrays, tiles or numbers; got tuple"),
        (jnp.ones((), jnp.complex64), "linear_recurrence: expected one of float16"),
    ]:
        with pytest.raises(TileTypeError, match=sentence):
            jt.linear_recurrence(x, x, 0, h0)
    with pytest.raises(
        TileValueError, match="linear_recurrence: expected direction in"
    ):
        jt.linear_recurrence(x, x, 0, direction=None)


def test_seed_of_another_kind():
    x = jnp.ones(3, jnp.int32)
    with pytest.raises(TileTypeError, match="expected init of dtype int32; got 0.5"):
        jt.reduce(x, 0, jt.add, init=0.5)
    for dtype, seed, got in [
        (jnp.int8, 300, "300"),
        (jnp.int8, np.int32(3), None),
        (jnp.int8, jnp.int32(3), "int32"),
        (jnp.uint8, -1, "-1"),
        (jnp.uint8, 255, None),
        (bool, 1, None),
        (bool, 2, "2"),
        (jnp.bfloat16, jnp.float32(1.001), "float32"),
        (jnp.bfloat16, np.float32(0.5), None),
        (jnp.bfloat16, 0.5, None),
        (jnp.bfloat16, np.float64(0.5), None),
        (jnp.float32, jnp.bfloat16(0.5), None),
        (jnp.float32, 7, None),
    ]:
        x = jnp.zeros(3, dtype)
        if got is None:
            value = jt.reduce(x, 0, jt.maximum, init=seed)
            assert value.dtype == dtype
            assert float(value) == float(seed)
        else:
            with pytest.raises(
                TileTypeError, match=f"init of dtype .*; got {got}. Cast"
            ):
                jt.reduce(x, 0, jt.maximum, init=seed)
    half = jnp.ones(3, jnp.float16)
    with pytest.raises(TileTypeError, match="expected init of dtype float16; got bfl"):
        jt.reduce(half, 0, jt.maximum, init=jnp.bfloat16(1))


def test_a_reducer_cannot_capture_a_traced_value():
    @jax.jit
    def run(x, k):
        scaled = jt.Reducer(merge=lambda a, b: a + k * b, name="scaled")
        return jt.reduce(x, 0, scaled, policy="fold_left")

    with pytest.raises(jt.errors.TileError, match="scaled"):
        run(jnp.ones(3), 2.0)


def test_recurrence_from_a_state_is_no_right_fold():
    x = jnp.ones(3)
    with pytest.raises(PolicyError, match="a policy that starts from h0; got"):
        jt.linear_recurrence(x, x, 0, 2.0, policy="fold_right")
    with pytest.raises(PolicyError, match="direction='suffix'"):
        jt.linear_recurrence(x, x, 0, 2.0, policy="fold_left", direction="suffix")


def test_what_is_no_array_is_named():
    x = jnp.ones(3)
    for bad in ({"where": object()}, {"init": object()}):
        with pytest.raises(TileTypeError, match="expected arrays, tiles or numbers"):
            jt.reduce(x, 0, jt.add, **bad)
    with pytest.raises(TileTypeError, match="got the integer 1099511627776"):
        jt.reduce(2**40, None, jt.add)
    with pytest.raises(TileTypeError, match="acc_dtype=bool"):
        jt.reduce(x, 0, jt.add, acc_dtype=bool)
    with pytest.raises(TileTypeError, match="expected reducers; got 3"):
        jt.product(3)


def test_reducers_see_scalars():
    vector = jt.Reducer(lambda a, b: a + b, finish=lambda s: jnp.ones(3) * s)
    with pytest.raises(TileTypeError, match="finish to return scalars"):
        jt.reduce(jnp.ones(3), 0, vector, policy="fold_left")


@pytest.mark.parametrize("call", [jt.reduce, jt.scan])
def test_a_number_that_a_float_does_not_represent(call, x64):
    """Silently it would be inf; inf itself is a seed like any other."""
    for dtype, seed in (
        ("float32", 1e300),
        ("float32", -3.5e38),
        ("float16", 70000.0),
        ("bfloat16", np.float64(1e39)),
    ):
        x = jnp.zeros(3, dtype)
        sentence = (
            f"expected init of dtype {dtype}; got .*, which {dtype} does not represent. "
            "Write jnp.inf where that is meant, or state acc_dtype="
        )
        with pytest.raises(TileTypeError, match=sentence):
            call(x, 0, jt.maximum, init=seed)
        for fine in (np.inf, -np.inf, np.nan, 3.4e38 if dtype == "float32" else 6e4):
            assert call(x, 0, jt.maximum, init=fine).dtype == dtype
    half = jnp.zeros(3, jnp.float16)
    assert call(half, 0, jt.maximum, init=7e4, acc_dtype="float32").dtype == "float32"
    huge = jt.Reducer(
        lambda a, b: jnp.maximum(a, b),
        identity=-1e300,
        laws=jt.Laws(associative=True, commutative=True),
    )
    with pytest.raises(TileTypeError, match="identity to be a constant state, float32"):
        call(jnp.zeros(3, jnp.float32), 0, huge)
    call(jnp.zeros(3, jnp.float64), 0, huge)
