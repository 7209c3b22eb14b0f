"""libtpu compiles the rules: every reducer, format and order; three chips, sampled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile as jt
import targets

pytestmark = targets.needs_libtpu

BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")
FLOATS = ("logaddexp", "welford", "matrix_affine")
CATALOGUE = (
    "add multiply maximum minimum maximum_number minimum_number logical_and logical_or "
    "bitwise_and bitwise_or bitwise_xor argmax argmin logaddexp welford affine first "
    "last"
).split()
REDUCERS = {name: (getattr(jt, name), lambda x: x) for name in CATALOGUE}
REDUCERS["affine"] = (jt.affine, lambda x: (x, x))
REDUCERS["matrix_affine"] = (jt.matrix_affine(2), lambda x: (((x, x), (x, x)), (x, x)))
REDUCERS["product"] = (jt.product(jt.add, jt.maximum), lambda x: (x, x))
REDUCERS["segmented"] = (jt.segmented(jt.add), lambda x: (x > 0, x))
REDUCERS["argmax_last"] = (jt.argmax(ties="last", nan="ignore"), lambda x: x)
REDUCERS["mixed"] = (
    jt.Reducer(
        lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1]), a[2] | b[2]),
        lift=lambda x: (x.astype(jnp.int32), x, x > 0),
        laws=jt.Laws(associative=True, commutative=True),
        name="mixed",
    ),
    lambda x: x,
)
POLICIES = tuple(policy.name for policy in jt.policy.ALL)


def _formats(name):
    if name in BITS:
        return ("int32",)
    return ("float32", "bfloat16") + ("int32",) * (name not in FLOATS)


def _policies(name):
    laws = REDUCERS[name][0].laws
    return POLICIES if laws.commutative else POLICIES[1:]


def _as_words(value):
    return jnp.where(value, 1, 0) if value.dtype == bool else value


def _compile(call, *args, chip="v5e"):
    """Compile a kernel of one block; scalars fill a row."""
    outs = jax.tree.leaves(jax.eval_shape(call, *args))

    def body(*refs):
        values = jax.tree.leaves(call(*(ref[...] for ref in refs[: len(args)])))
        for ref, value in zip(refs[len(args) :], values, strict=True):
            ref[...] = jnp.broadcast_to(_as_words(value), ref.shape)

    out = [
        targets.spec(v.shape or (1, 128), "int32" if v.dtype == bool else v.dtype)
        for v in outs
    ]
    return targets.compile_for_tpu(body, out, *args, chip=chip)


def _call(op, name, policy, axis, form, x, words):
    reducer, element = REDUCERS[name]
    fn = jt.reduce if op == "reduce" else jt.scan
    named = dict(where=words != 0) if form % 2 else {}
    if op == "scan":
        named |= dict(direction=("prefix", "suffix", "reverse")[form % 3])
        named |= dict(return_final=form % 4 < 2)
    return fn(element(x), axis, reducer, policy=policy, **named)


def _cases():
    for op in ("reduce", "scan"):
        for name in REDUCERS:
            for dtype in _formats(name):
                for policy in _policies(name):
                    yield op, name, dtype, policy


CASES = list(_cases())


def _compile_case(op, name, dtype, policy, form, chip="v5e"):
    shape, axis = [((20, 200), 0), ((9, 130), 1), ((3, 10, 128), 1), ((300,), 0)][
        form % 4
    ]
    call = functools.partial(_call, op, name, policy, axis, form)
    x = targets.spec(shape, dtype)
    assert _compile(call, x, targets.spec(shape, "int32"), chip=chip) is not None


def _sample(count, seed):
    places = np.random.default_rng(seed).permutation(len(CASES))[:count]
    return [(*CASES[i], int(i)) for i in places]


@pytest.mark.parametrize("op", ["reduce", "scan"])
@pytest.mark.parametrize("name", REDUCERS)
def test_libtpu_compiles_every_reducer(op, name):
    for k, dtype in enumerate(_formats(name)):
        policies = _policies(name)
        form = k + len(name)
        _compile_case(op, name, dtype, policies[form % len(policies)], form)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("op", ["reduce", "scan"])
def test_libtpu_compiles_every_order_of_add(op, dtype, policy):
    _compile_case(op, "add", dtype, policy, len(dtype) + len(policy))


@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_libtpu_compiles_for_newer_chips(chip):
    for case in _sample(12, seed=len(chip)):
        _compile_case(*case, chip=chip)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("place", range(len(CASES)))
def test_libtpu_compiles_everything(place, chip):
    for form in (place, place + 1):
        _compile_case(*CASES[place], form, chip=chip)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((300, 128), 0),
        ((8, 128), (0, 1)),
        ((9, 100), (0, 1)),
        ((3, 5, 8), 2),
        ((3, 5, 8), (0, 2)),
        ((3, 5, 7), (1, 2)),
        ((2, 3, 5, 8), (1, 3)),
        ((2, 3, 5, 8), (0, 1)),
        ((1000,), 0),
        ((8, 128), ()),
    ],
)
def test_libtpu_compiles_any_axes(shape, axes):
    gone = (axes,) if isinstance(axes, int) else axes
    kept = tuple(s for d, s in enumerate(shape) if d not in gone)

    def call(x, z, words):
        seed = z if kept else z[0, 0]
        total = jt.reduce(
            x, axes, jt.add, policy="fixed_tree", init=seed, where=words != 0
        )
        return total, jt.reduce(x, axes, jt.argmax, policy="fold_right")

    x = targets.spec(shape)
    assert _compile(call, x, targets.spec(kept or (1, 1)), targets.spec(shape, "int32"))
