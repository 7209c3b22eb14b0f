"""What supports, support_table and explain say, and what interpret mode computes."""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxtile as jt
import targets
from jaxtile.pallas_lowering import NAMES, _registry

X = targets.spec((64, 128))


@pytest.mark.parametrize("backend", NAMES)
def test_supports_says_yes(backend):
    answer = jt.supports("reduce", backend, X, 0, jt.add, policy="fixed_tree")
    assert answer
    assert answer.reason is None
    assert str(answer) == "yes"


@pytest.mark.parametrize("backend", NAMES)
def test_supports_says_no_with_the_rules_own_sentence(backend):
    x = targets.spec((64,), "int32")
    answer = jt.supports("cast", backend, x, "bfloat16")
    assert not answer
    cast, narrow = jt.primitives.cast_p, jnp.dtype("bfloat16")
    assert answer.reason == _registry.BACKENDS[backend].why_not(cast, x, dtype=narrow)
    assert str(answer) == f"no: {answer.reason}"


def test_supports_takes_arrays_and_knows_shapes():
    assert jt.supports("reduce", "triton", jnp.ones((64, 128)), 0, jt.add)
    ragged = jt.supports("reduce", "triton", jnp.ones((48,)), 0, jt.add)
    assert "powers of two" in ragged.reason


def test_supports_looks_into_the_region_of_map():
    assert jt.supports("map", "triton", jnp.sinh, X)
    assert "sinh" in jt.supports("map", "mosaic_gpu", jnp.sinh, X).reason
    table = jnp.arange(4.0)
    closed = jt.supports("map", "tpu", lambda v: v + table[0], X)
    assert closed or "closes over" in closed.reason


def test_supports_asks_each_format():
    assert "float16" in jt.supports("cast", "tpu", X, "float16").reason
    assert (
        "round twice"
        in jt.supports(
            "cast", "triton", targets.spec((64,), "int32"), "bfloat16"
        ).reason
    )


@pytest.mark.parametrize(("op", "backend"), [("fft", "tpu"), ("reduce", "rocm")])
def test_supports_rejects_unknown_names(op, backend):
    with pytest.raises(jt.errors.TileValueError, match="support_table"):
        jt.supports(op, backend, X)


@pytest.mark.parametrize("bad", [[], None, 3, np.array(["a", "b"])])
def test_names_are_strings(bad):
    for call in (
        lambda: jt.supports(bad, "tpu", X),
        lambda: jt.supports("cast", bad, X, "float16"),
    ):
        with pytest.raises(jt.errors.TileValueError, match="supports: expected .* in "):
            call()
    if bad is not None:
        with pytest.raises(jt.errors.TileValueError, match="implementation in"):
            jt.reduce(jnp.ones(3), 0, jt.add, implementation=bad)
        with pytest.raises(jt.errors.TileValueError, match="implementation in"):
            with jt.use_implementation(bad):
                pass


def test_what_explain_and_supports_take():
    with pytest.raises(jt.errors.TileTypeError, match="explain: .*a function; got 3"):
        jt.explain(3)
    with pytest.raises(
        jt.errors.TileTypeError, match="supports: .*reduce.*Pass x, axis"
    ):
        jt.supports("reduce", "tpu", X)
    wide = jax.ShapeDtypeStruct((8, 128), "float64")
    for call in (
        lambda: jt.explain(jt.exp)(wide),
        lambda: jt.supports("reduce", "tpu", wide, 0, jt.add),
    ):
        with pytest.raises(jt.errors.TileTypeError, match="jax_enable_x64 is off"):
            call()


def test_support_table_agrees_with_supports():
    lines = jt.support_table().splitlines()
    width = len(lines[0].split("|"))
    rows = [line for line in lines if line.startswith("|")]
    assert all(len(row.split("|")) == width for row in rows)
    (scan,) = [row for row in rows if row.startswith("| scan add")]
    assert scan.count("no [") == 0
    notes = lines[len(rows) + 1 :]
    used = {int(n) for row in rows for n in _footnotes(row)}
    assert used == set(range(1, len(notes) + 1))


def _footnotes(row):
    return [
        cell.split("[")[1].rstrip("] ") for cell in row.split("|") if "no [" in cell
    ]


def test_why_not_has_no_third_state():
    unknown = jax.extend.core.Primitive("unknown")
    for backend in _registry.BACKENDS.values():
        assert backend.why_not(unknown) == "this backend has no rule for it"


def test_a_backend_that_cannot_be_imported_says_so():
    code = """
        import sys
        sys.modules["jax.experimental.mosaic.gpu"] = None
        import jaxtile as jt
        import jax
        x = jax.ShapeDtypeStruct((64, 128), "float32")
        answer = jt.supports("reduce", "mosaic_gpu", x, 0, jt.add)
        assert "jax.experimental.mosaic.gpu" in answer.reason
        assert jt.supports("reduce", "tpu", x, 0, jt.add)
        print(jt.support_table())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "install what it misses" in done.stdout


def _row_sums(x_ref, o_ref):
    o_ref[...] = jt.reduce(x_ref[...], 1, jt.add, policy="fixed_tree")


def _kernel(body, out, **params):
    return pl.pallas_call(body, out_shape=out, **params)


def test_explain_counts_bytes_and_flops():
    (entry,) = jt.explain(lambda x: jt.reduce(x, 1, jt.add))(X)
    assert (entry.op, entry.place, entry.implementation) == (
        "reduce",
        "array",
        "reference",
    )
    assert entry.bytes == 4 * (64 * 128 + 64)
    assert entry.flops == 64 * 128
    assert set(entry.refusals) == set(NAMES)


def test_explain_sees_through_jit_scan_cond_while_and_derivatives():
    def step(carry, row):
        return carry + jt.reduce(row, 0, jt.add), None

    def fn(x):
        total, _ = jax.lax.scan(step, 0.0, x)
        total = jax.lax.cond(
            total > 0, lambda t: jt.cast(t, "bfloat16") * 1.0, _half, total
        )
        return jax.lax.while_loop(lambda t: t < 9, lambda t: jt.map(jnp.exp, t), total)

    report = jt.explain(jax.jit(fn))(X)
    assert [e.op for e in report] == ["reduce", "cast", "cast", "map"]
    assert report.entries[0].times == 64
    tangents = jt.explain(jax.grad(lambda x: jt.reduce(x, None, jt.logaddexp)))(X)
    assert len(tangents) > 1


def _half(total):
    return jt.cast(total / 2, "bfloat16")


def test_explain_marks_kernels():
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import triton as plt

    out = targets.spec((64,))

    def fn(x):
        return (
            _kernel(_row_sums, out, interpret=True)(x),
            _kernel(_row_sums, out, compiler_params=plt.CompilerParams())(x),
            _kernel(_row_sums, out, compiler_params=pltpu.CompilerParams())(x),
            plgpu.kernel(_row_sums, out_type=out)(x),
        )

    found = [(e.place, e.implementation) for e in jt.explain(fn)(X)]
    assert found == [
        ("in kernel: interpret", "reference"),
        ("in kernel: triton", "triton"),
        ("in kernel: tpu", "tpu"),
        ("in kernel: mosaic_gpu", "mosaic_gpu"),
    ]


def test_explain_counts_the_grid():
    kernel = pl.pallas_call(
        _row_sums,
        out_shape=targets.spec((64,)),
        grid=(8,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8,), lambda i: (i,)),
        interpret=True,
    )
    (entry,) = jt.explain(kernel)(X)
    assert entry.times == 8
    assert entry.flops == 64 * 128


def test_explain_prints_what_it_knows():
    text = str(jt.explain(lambda x: jt.scan(x, 0, jt.add))(X))
    assert "runs as reference" in text
    for name in NAMES:
        assert f"not {name}:" in text
    assert str(jt.explain(jnp.sin)(X)) == "no tile ops"


@pytest.mark.parametrize("policy", [p.name for p in jt.policy.ALL])
def test_interpret_mode_computes_the_array_form(policy):
    x = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)

    def body(x_ref, sums_ref, scans_ref):
        x = jt.cast(jt.cast(x_ref[...], jnp.bfloat16), jnp.float32)
        sums_ref[...] = jt.reduce(x, 1, jt.add, policy=policy, where=x > 0)
        scans_ref[...] = jt.scan(x, 0, jt.add, policy=policy)

    outs = _kernel(body, (targets.spec((16,)), X.update(shape=x.shape)), interpret=True)
    rounded = x.astype(jnp.bfloat16).astype(np.float32)
    want = (
        jt.reduce(rounded, 1, jt.add, policy=policy, where=rounded > 0),
        jt.scan(rounded, 0, jt.add, policy=policy),
    )
    for got, expected in zip(outs(x), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_interpret_mode_maps_and_bitcasts():
    x = np.linspace(-2, 2, 64, dtype=np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = jt.bitcast(jt.map(lambda v: v * v + 1.0, x_ref[...]), jnp.uint32)

    got = _kernel(body, targets.spec((64,), "uint32"), interpret=True)(x)
    np.testing.assert_array_equal(got.view(np.float32), x * x + np.float32(1))


def test_explain_counts_the_kernels_of_a_call():
    def launches(shape):
        report = jt.explain(lambda v: jt.scan(v, 0, jt.add), platform="cuda")
        (entry,) = report(targets.spec(shape))
        assert entry.implementation == "mosaic_gpu"
        return entry.launches

    assert launches((64, 65536)) == 1
    # Totals of chunks, their prefixes, then the chunks.
    assert launches((2**22,)) >= 3
    (entry,) = jt.explain(lambda v: jt.scan(v, 0, jt.add), platform="cpu")(X)
    assert entry.launches is None


@pytest.mark.parametrize(
    ("platform", "kernel"), [("cuda", "mosaic_gpu"), ("tpu", "tpu")]
)
def test_xla_reduces_only_what_may_be_permuted(platform, kernel):
    # The reference of an ordered sum is no XLA reduction: nothing makes it the faster one.
    def chosen(**params):
        fn = functools.partial(jt.reduce, axis=0, **params)
        (entry,) = jt.explain(fn, platform=platform)(targets.spec((512, 256)))
        return entry.implementation

    assert chosen(reducer=jt.add) == "reference"
    assert chosen(reducer=jt.add, policy="ordered_tree") == kernel
    assert chosen(reducer=jt.minimum) == kernel
