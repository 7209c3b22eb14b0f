"""What a reducer may be made of, by the sentence with which the rest is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
from jaxtile.errors import TileShapeError, TileTypeError, TileValueError
from jaxtile.laws import check_laws

LAWS = jt.Laws(associative=True, commutative=True)
FLOATS, INTS = jnp.arange(3.0), jnp.arange(3)
KEEP = jnp.array([True, False, True])
WEIGHTS = jnp.arange(3.0)


def _plus(a, b):
    return a + b


def _total(x=FLOATS, merge=_plus, policy="unordered_tree", **parts):
    return jt.reduce(x, 0, jt.Reducer(merge, laws=LAWS, **parts), policy=policy)


def _print(v):
    jax.debug.print("{v}", v=v)
    return v


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (dict(merge=3), "expected a callable merge; got 3"),
        (dict(merge=None), "expected a callable merge; got None"),
        (dict(lift="x"), "expected a callable lift; got 'x'"),
        (dict(update=1), "expected a callable update; got 1"),
        (dict(update_right=1), "expected a callable update_right; got 1"),
        (dict(finish=1), "expected a callable finish; got 1"),
        (dict(resume=1), "expected a callable resume; got 1"),
        (dict(laws=None), "expected laws of type Laws; got None"),
        (dict(laws="associative"), "expected laws of type Laws; got 'associative'"),
        (dict(name=3), "expected name of type str; got 3"),
        (dict(indexed="yes"), "expected indexed to be True or False; got 'yes'"),
        (dict(exact_identity=1), "expected exact_identity to be True or False; got 1"),
    ],
)
def test_the_constructor(parts, sentence):
    with pytest.raises(TileTypeError, match=f"^Reducer: {sentence}"):
        jt.Reducer(**{"merge": _plus} | parts)


def test_names_where_values_are_wanted():
    with pytest.raises(TileValueError, match="Reducer: expected empty.*got 'none'"):
        jt.Reducer(_plus, empty="none")
    with pytest.raises(
        TileTypeError, match="Laws: expected commutative to be True or F"
    ):
        jt.Laws(True, "no")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("what", ["merge", "lift", "finish", "update", "update_right"])
@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (lambda: 1, r"to take \(float32.*TypeError: .* 0 positional"),
        (lambda *v: None, "to return scalars: it sees one element; got nothing"),
        (lambda *v: "a", "TypeError: .*<class 'str'>"),
        (lambda *v: v[0] + WEIGHTS, r"to return scalars: .*got shapes \[\(3,\)\]"),
        (
            lambda *v: np.sin(v[0]),
            "TracerArrayConversionError.*use jax.numpy, not NumPy",
        ),
        (
            lambda *v: v[0] if v[0] > 0 else v[-1],
            "TracerBoolConversionError.*jnp.where",
        ),
        (lambda *v: v[0] + 2**40, "OverflowError"),
        (lambda *v: v[0].first, "AttributeError"),
        (lambda *v: _print(v[0]), "without side effects; got debug_"),
        (
            lambda *v: jax.pure_callback(np.sin, v[0], v[0]),
            "effects; got pure_callback",
        ),
    ],
)
def test_functions_that_do_not_fit(what, fn, sentence):
    parts = {"merge": _plus, "identity": 0.0} | {what: fn}
    policy = "fold_right" if what == "update_right" else "fold_left"
    with pytest.raises(
        TileTypeError, match=rf"(?s)Reducer\(\S+\)'s {what} .*{sentence}"
    ):
        _total(policy=policy, **parts)


@pytest.mark.parametrize("what", ["merge", "update", "update_right"])
@pytest.mark.parametrize(
    ("fn", "got"),
    [
        (lambda a, b: (a, b), r"\(float32, float32\)"),
        (lambda a, b: a > b, "bool"),
        (lambda a, b: (a + b).astype(jnp.float16), "float16"),
    ],
)
def test_functions_that_change_the_state(what, fn, got):
    parts = {"merge": _plus, "identity": 0.0} | {what: fn}
    sentence = f"{what} to return a state like its operands, float32; got {got}. Conv"
    with pytest.raises(TileTypeError, match=sentence):
        _total(policy="fold_left", **parts)


@pytest.mark.parametrize("what", ["identity", "empty"])
@pytest.mark.parametrize(
    ("x", "value", "got"),
    [
        (FLOATS, (0.0, 0.0), r"\(0.0, 0.0\)"),
        (FLOATS, [0.0], r"\[0.0\]"),
        (FLOATS, {"a": 0.0}, "{'a': 0.0}"),
        (FLOATS, np.zeros(3), "array"),
        (FLOATS, jnp.zeros(3), "Array"),
        (FLOATS, 1j, "1j"),
        (FLOATS, lambda state: None, "None"),
        (FLOATS, lambda state: (state, state), r"\(float32, float32\)"),
        (FLOATS, lambda state: jnp.zeros(3), "float32"),
        (INTS, lambda state: 0.5, "float32"),
        (INTS, 0.5, "0.5"),
        (INTS, -np.inf, "-inf"),
        (INTS, np.nan, "nan"),
        (INTS, 2**40, str(2**40)),
        (INTS.astype(jnp.uint32), -1, "-1"),
        (KEEP, 2, "2"),
    ],
)
def test_values_that_are_no_state(what, x, value, got):
    merge = jnp.logical_or if x is KEEP else _plus
    sentence = (
        f"'s {what} to be a constant state, {x.dtype}; got {got}.* Give one number"
    )
    with pytest.raises(TileTypeError, match=sentence):
        _total(x, merge, **{"identity": 0} | {what: value})


def test_an_identity_may_round_and_may_be_of_another_container():
    pair = jt.Reducer(
        lambda a, b: (a[0] + b[0], a[1] + b[1]), identity=[0, 0.1], laws=LAWS
    )
    got = jt.reduce((INTS, FLOATS), 0, pair, where=KEEP)
    assert (int(got[0]), float(got[1])) == (2, 2.0)
    assert int(_total(INTS, identity=0.0)) == 3
    with pytest.raises(TileTypeError, match="identity to be a function of a state's"):
        _total(identity=lambda: 0.0)
    with pytest.raises(TileTypeError, match="identity to be a function of a state's"):
        _total(identity=lambda state: "a")
    with pytest.raises(TileTypeError, match="expected Reducer.*'s identity.*got 'a'"):
        _total(identity="a")
    narrow = jt.Reducer(_plus, identity=lambda state: jnp.float32(0), laws=LAWS)
    got = jt.reduce(FLOATS, 0, narrow, acc_dtype=jnp.bfloat16, where=KEEP)
    assert (float(got), got.dtype) == (2.0, jnp.bfloat16)


def test_a_reducer_is_bound_inside_shard_map():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("i")
    pair = jt.Reducer(
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        identity=lambda s: (jnp.zeros_like(s[0]), jnp.zeros_like(s[1])),
        lift=lambda v: (v, v * v),
        laws=LAWS,
    )
    x = jnp.arange(16.0).reshape(8, 2)
    each = jax.shard_map(
        lambda v: jt.reduce(v, 1, pair)[1], mesh=mesh, in_specs=rows, out_specs=rows
    )
    want = (np.arange(16.0).reshape(8, 2) ** 2).sum(1)
    np.testing.assert_array_equal(each(x), want)


def test_an_identity_that_is_traced():
    @jax.jit
    def run(x, k):
        return _total(x, identity=k)

    with pytest.raises(TileTypeError, match="'s identity to be a constant state"):
        run(FLOATS, 0.0)


def test_functions_may_close_over_constant_arrays():
    def lift(v):
        return v * jnp.dot(WEIGHTS, WEIGHTS)

    def merge(a, b):
        return a + b + 0 * WEIGHTS[1]

    reducer = jt.Reducer(merge, lift=lift, identity=0.0, laws=LAWS)
    want = 5 * np.arange(3.0)
    for run in (lambda f, *x: f(*x), lambda f, *x: jax.jit(f)(*x)):
        assert run(lambda x: jt.reduce(x, 0, reducer), FLOATS) == want.sum()
        got = run(lambda x: jt.scan(x, 0, reducer), FLOATS)
        np.testing.assert_array_equal(got, np.cumsum(want))
        slope = run(jax.grad(lambda x: jt.reduce(x, 0, reducer)), FLOATS)
        np.testing.assert_array_equal(slope, [5, 5, 5])


def test_a_resume_that_does_not_fit():
    reducer = jt.Reducer(_plus, laws=LAWS, resume=lambda: 1)
    with pytest.raises(TileTypeError, match="resume to take its result; got TypeError"):
        jt.reduce(FLOATS, 0, reducer, init=1.0)


@pytest.mark.parametrize("k", ["a", 1.5, None, True, jnp.ones(2, int)])
def test_matrix_affine_of_no_integer(k):
    with pytest.raises(
        TileTypeError, match="matrix_affine: expected k, a Python integer"
    ):
        jt.matrix_affine(k)


def test_matrix_affine_of_another_size():
    one, x = jnp.ones(3), FLOATS
    for k, element in [
        (2, (((one,),), (x,))),
        (1, (((one, one), (one, one)), (x, x))),
        (2, (((one, one), (one, one)), (x,))),
    ]:
        with pytest.raises(
            TileShapeError, match=rf"^matrix_affine\({k}\): .*{k} rows of"
        ):
            jt.scan(element, 0, jt.matrix_affine(k))


def test_affine_coefficients_are_of_one_kind():
    sentence = (
        "affine: expected a and b both floats, or both integers; got a int32 and b"
    )
    with pytest.raises(TileTypeError, match=sentence):
        jt.scan((INTS, FLOATS), 0, jt.affine)
    with pytest.raises(TileTypeError, match="got a bool and b bool"):
        jt.scan((KEEP, KEEP), 0, jt.affine)


@pytest.mark.parametrize("acc_dtype", [None, jnp.float32])
def test_the_head_of_a_segment_is_bool(acc_dtype):
    scan = functools.partial(
        jt.scan, axis=0, reducer=jt.segmented(jt.add), acc_dtype=acc_dtype
    )
    np.testing.assert_array_equal(scan((KEEP, FLOATS)), [0, 1, 2])
    for swapped in ((FLOATS, KEEP), (INTS, KEEP), (INTS, FLOATS)):
        with pytest.raises(
            TileTypeError, match="segmented: .*bool head; got a head of"
        ):
            scan(swapped)


def test_reducers_of_reducers_and_of_options():
    with pytest.raises(TileTypeError, match="product: expected at least one reducer"):
        jt.product()
    with pytest.raises(TileTypeError, match="segmented: expected reducers; got 'add'"):
        jt.segmented("add")
    for reducer in (jt.argmax, jt.argmin):
        with pytest.raises(TileTypeError, match=r"options among ties, nan; got foo"):
            reducer(foo=1)
        with pytest.raises(TileValueError, match=r'expected ties="first"'):
            reducer(ties=[])


def test_calling_a_reducer_broadcasts_and_promotes():
    rows = jnp.ones((2, 3))
    np.testing.assert_array_equal(
        jt.add(rows, FLOATS), np.ones((2, 3)) + np.arange(3.0)
    )
    np.testing.assert_array_equal(jt.add(INTS, 0.5), np.arange(3) + 0.5)
    cols = jt.Dim("cols")
    tile = jt.tile(INTS, cols)
    got = jt.multiply(tile, jt.tile(FLOATS, cols))
    np.testing.assert_array_equal(got.array, np.arange(3.0) ** 2)
    assert jt.add(tile, 1).dtype == jnp.int32
    for a, b, sentence in [
        ("a", 1, "expected arrays, tiles or numbers; got str"),
        (None, FLOATS, "expected two states of one structure"),
        (jnp.ones(2), FLOATS, "expected two states of one structure, whose leaves"),
    ]:
        with pytest.raises(TileTypeError, match=f"^add: {sentence}"):
            jt.add(a, b)
    with pytest.raises(TileTypeError, match="^welford: expected two states.*'count'"):
        jt.welford(FLOATS, FLOATS)


def test_what_check_laws_takes():
    for reducer, examples, sentence in [
        (3, [1], "expected a Reducer; got 3"),
        (jt.add, 3, "at least one example, all of one structure; got 3"),
        (jt.add, "abc", "at least one example, all of one structure; got 'abc'"),
        (jt.add, ["a"], "expected arrays, tiles or numbers; got str"),
        (jt.add, [2**40], "at most 32 bits"),
        (jt.add, [FLOATS], r"examples that are pytrees of scalars; got .*\(3,\)"),
    ]:
        with pytest.raises(TileTypeError, match=f"^check_laws: .*{sentence}"):
            check_laws(reducer, examples)
