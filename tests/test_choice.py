"""Which implementation runs reduce and scan: the choice, insisting on one, its errors."""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxtile as jt
from fakes import Kernels
from jaxtile.errors import TileValueError, UnsupportedOnBackend
from jaxtile.pallas_lowering import NAMES, SERVES
from oracle import same_bits

_X = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
_OPS = {
    "reduce": lambda x, **kw: jt.reduce(x, 1, jt.add, policy="fixed_tree", **kw),
    "scan": lambda x, **kw: jt.scan(x, 1, jt.add, policy="fixed_tree", **kw),
    "recurrence": lambda x, **kw: jt.linear_recurrence(x, x, 1, **kw),
}


@pytest.fixture
def kernels(monkeypatch):
    """Backends that have only the fakes that a test gives them."""
    return Kernels(monkeypatch)


@pytest.fixture(params=_OPS)
def op(request):
    """A function of an array and of `implementation=`."""
    return _OPS[request.param]


def _lower(fn, x, *platforms):
    # jit caches by the function: a new one is traced and lowered each time.
    return jax.jit(lambda x: fn(x)).trace(x).lower(lowering_platforms=platforms)


def _no_floats(*avals, **params):
    return "it adds integers only" if avals[0].dtype == np.float32 else None


def _measured(*avals, **params):
    return "the reference was measured faster"


def test_the_best_that_accepts_runs(kernels, op):
    with kernels.expect():
        _lower(op, _X, "cuda")
    kernels.add("triton")
    with kernels.expect("triton"):
        _lower(op, _X, "cuda")
    kernels.add("mosaic_gpu")
    with kernels.expect("mosaic_gpu"):
        _lower(op, _X, "cuda")
    kernels.add("mosaic_gpu", refuse=_no_floats)
    with kernels.expect("triton"):
        _lower(op, _X, "cuda")
    kernels.add("triton", slower=_measured)
    with kernels.expect():
        _lower(op, _X, "cuda")


def test_arithmetic_around_a_kernel_is_the_platforms_own(kernels, op):
    kernels.add("mosaic_gpu")
    _lower(op, _X, "cuda")
    assert kernels.platform == "cuda"


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_a_backend_runs_on_its_platform_only(kernels, op, platform):
    for name in NAMES:
        kernels.add(name)
    with kernels.expect(*SERVES.get(platform, ())[:1]):
        _lower(op, _X, platform)


def test_who_insists_gets_a_slower_kernel(kernels, op):
    kernels.add("mosaic_gpu")
    kernels.add("triton", slower=_measured)
    with kernels.expect("triton"):
        _lower(lambda x: op(x, implementation="triton"), _X, "cuda")


def test_reference_wins_over_kernels(kernels, op):
    kernels.add("mosaic_gpu")
    with kernels.expect():
        _lower(lambda x: op(x, implementation="reference"), _X, "cuda")
        with jt.use_implementation("reference"):
            _lower(op, _X, "cuda")
    with kernels.expect("mosaic_gpu"), jt.use_implementation("reference"):
        _lower(lambda x: op(x, implementation="mosaic_gpu"), _X, "cuda")


def test_kernels_see_no_implementation(kernels, op):
    seen = set()
    kernels.add("triton", refuse=lambda *avals, **params: seen.update(params))
    _lower(lambda x: op(x, implementation="triton"), _X, "cuda")
    assert "spec" in seen & kernels.given
    assert "implementation" not in seen | kernels.given


def test_a_refusal_has_op_reason_and_way_out_when_traced(kernels):
    kernels.add("triton", refuse=_no_floats)
    for trace in (jax.eval_shape, lambda fn, x: jax.jit(fn).trace(x)):
        with pytest.raises(UnsupportedOnBackend) as caught:
            trace(lambda x: jt.scan(x, 1, jt.add, implementation="triton"), _X)
        assert str(caught.value) == (
            "scan: expected an implementation that accepts the call; got "
            "implementation='triton': it adds integers only. Use implementation=None or "
            '"reference".'
        )


def test_a_refusal_sees_the_shape_under_vmap(kernels):
    deep = lambda *avals, **params: "3-d" if avals[0].ndim == 3 else None  # noqa: E731
    kernels.add("triton", refuse=deep)
    one = lambda x: jt.reduce(x, 1, jt.add, implementation="triton")  # noqa: E731
    with kernels.expect("triton"):
        _lower(one, _X, "cuda")
    with pytest.raises(UnsupportedOnBackend, match="3-d"):
        jax.eval_shape(jax.vmap(one), _X[None])
    with kernels.expect():
        _lower(jax.vmap(lambda x: jt.reduce(x, 1, jt.add)), _X[None], "cuda")


@pytest.mark.parametrize("name", NAMES)
def test_insisting_on_another_platform_raises(kernels, op, name):
    kernels.add(name)
    home = next(p for p, names in SERVES.items() if name in names)
    sentence = f"got implementation='{name}': it runs on {home}, not on cpu. Use"
    with pytest.raises(UnsupportedOnBackend, match=sentence):
        op(_X, implementation=name)
    with pytest.raises(UnsupportedOnBackend, match="not on this platform"):
        _lower(lambda x: op(x, implementation=name), _X, "rocm")
    with jt.use_implementation(name), pytest.raises(UnsupportedOnBackend):
        op(_X)


def test_insisting_without_a_kernel_raises(kernels, op):
    with pytest.raises(UnsupportedOnBackend, match="tpu has no whole-array kernel for"):
        op(_X, implementation="tpu")


def test_unknown_names_are_rejected(op):
    with pytest.raises(TileValueError, match="got 'cuda'"):
        op(_X, implementation="cuda")
    with pytest.raises(TileValueError), jt.use_implementation("cuda"):
        pass


def test_an_unsuited_device_counts_as_a_refusal(kernels, monkeypatch, op):
    kernels.add("mosaic_gpu")
    kernels.add("triton")
    backend = jt.pallas_lowering._registry.BACKENDS["mosaic_gpu"]
    old = backend.hooks._replace(unavailable=lambda: "the device here is older")
    monkeypatch.setattr(backend, "hooks", old)
    with kernels.expect("triton"):
        _lower(op, _X, "cuda")
    with pytest.raises(UnsupportedOnBackend, match="the device here is older"):
        _lower(lambda x: op(x, implementation="mosaic_gpu"), _X, "cuda")


def test_compute_capability_decides_where_there_are_devices(monkeypatch):
    class Device:
        compute_capability = "8.6"

    need = jt._jax_private._cuda_from
    assert need(9.0)() is None  # no CUDA device here: one that suits is assumed
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device()])
    assert need(8.0)() is None
    assert "needs compute capability 9.0, and a device here has 8.6" in need(9.0)()


def test_kernels_run_eagerly_under_jit_vmap_and_grad(kernels, op):
    kernels.serve("cpu", "tpu")
    kernels.add("tpu")
    insist = lambda x: op(x, implementation="tpu")  # noqa: E731
    reference = lambda x: op(x, implementation="reference")  # noqa: E731
    loss = lambda fn: lambda x: jnp.sum(jnp.sin(fn(x)))  # noqa: E731
    for change in (lambda f: f, jax.jit, jax.vmap, lambda f: jax.grad(loss(f))):
        x = _X[None] if change is jax.vmap else _X
        del kernels.ran[:]
        jax.clear_caches()  # the call before it compiled the same kernel
        got = change(insist)(x)
        assert kernels.ran
        same_bits(got, change(reference)(x))


def _asked(jaxpr):
    """What every tile op of a jaxpr insists on."""
    from jaxtile import _found

    return [f.eqn.params["implementation"] for f in _found.find(jaxpr.jaxpr)]


@pytest.mark.parametrize("reducer", [jt.add, jt.maximum, jt.logaddexp, jt.multiply])
@pytest.mark.parametrize("call", [jt.reduce, jt.scan])
def test_derivatives_insist_on_the_reference_only(kernels, call, reducer):
    kernels.add("triton")
    for name, of_tangent in (("triton", None), ("reference", "reference")):
        fn = lambda x, n=name: jnp.sum(jnp.sin(call(x, 1, reducer, implementation=n)))  # noqa: E731
        push = functools.partial(jax.jvp, fn)
        first, *rest = _asked(jax.make_jaxpr(push)((_X,), (_X,)))
        assert (first, set(rest)) == (name, {of_tangent})
        first, *rest = _asked(jax.make_jaxpr(jax.grad(fn))(_X))
        assert first == name
        assert set(rest) <= {of_tangent}


def test_batching_keeps_what_was_asked(kernels, op):
    kernels.add("triton")
    fn = jax.vmap(lambda x: op(x, implementation="triton"))
    assert set(_asked(jax.make_jaxpr(fn)(_X[None]))) == {"triton"}


def test_different_implementations_share_no_cache_entry(kernels):
    kernels.serve("cpu", "tpu")
    kernels.add("tpu")
    fn = jax.jit(lambda x: jt.reduce(x, 0, jt.add))
    for name, ran in (("reference", []), ("tpu", ["tpu"]), (None, ["tpu"])):
        with kernels.expect(*ran), jt.use_implementation(name):
            fn(_X)
    with kernels.expect(), jt.use_implementation("tpu"):
        fn(_X)
    static = jax.jit(
        lambda x, name: jt.scan(x, 0, jt.add, implementation=name), static_argnums=1
    )
    with kernels.expect("tpu"):
        static(_X, "reference")
        static(_X, "tpu")


def test_export_for_several_platforms(kernels, op):
    kernels.add("mosaic_gpu")
    kernels.add("tpu")
    fn = jax.jit(lambda x: op(x))
    with kernels.expect("mosaic_gpu", "tpu"):
        exported = export.export(fn, platforms=("cpu", "cuda", "tpu"))(_X)
    same_bits(exported.call(_X), fn(_X))
    with pytest.raises(UnsupportedOnBackend, match="it runs on tpu, not on c"):
        export.export(
            jax.jit(lambda x: op(x, implementation="tpu")), platforms=("cpu", "tpu")
        )(_X)


def test_export_of_symbolic_shapes_takes_the_reference(kernels, op):
    kernels.add("mosaic_gpu")
    spec = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 24"), np.float32)
    with pytest.raises(UnsupportedOnBackend, match="made for one shape"):
        jax.eval_shape(lambda x: op(x, implementation="mosaic_gpu"), spec)


def _explained(fn, platform=None):
    (entry,) = jt.explain(fn, platform=platform)(_X)
    return entry


def test_explain_names_the_choice_and_why_not_the_others(kernels):
    total = lambda x, name=None: jt.reduce(x, 1, jt.add, implementation=name)  # noqa: E731
    kernels.add("triton")
    kernels.add("tpu", refuse=_no_floats)
    here = _explained(total)
    assert here.implementation == "reference"
    assert here.refusals == {
        "mosaic_gpu": "mosaic_gpu has no whole-array kernel for reduce yet; the op lowers "
        "inside your own kernel bodies where the support table says so",
        "triton": "it runs on cuda, not on cpu",
        "tpu": "it adds integers only",
    }
    assert _explained(total, "cuda").implementation == "triton"
    assert set(_explained(total, "cuda").refusals) == {"mosaic_gpu", "tpu"}
    assert _explained(total, "tpu").implementation == "reference"
    kernels.add("mosaic_gpu", slower=_measured)
    entry = _explained(total, "cuda")
    assert entry.implementation == "triton"
    assert entry.refusals["mosaic_gpu"] == "the reference was measured faster"
    entry = _explained(lambda x: total(x, "mosaic_gpu"), "cuda")
    assert entry.implementation == "mosaic_gpu"
    assert entry.refusals["triton"] == "mosaic_gpu was asked for"
    kernels.add("mosaic_gpu")
    assert _explained(total, "cuda").refusals["triton"] == "mosaic_gpu goes first"
    entry = _explained(lambda x: total(x, "reference"), "cuda")
    assert entry.implementation == "reference"
    assert entry.refusals["triton"] == "reference was asked for"
    entry = _explained(lambda x: total(x, "triton"), "cpu")
    assert entry.implementation == "refused"
    assert entry.refusals["triton"] == "it runs on cuda, not on cpu"


def test_explain_agrees_with_what_is_lowered(kernels, op):
    for name in NAMES:
        kernels.add(name, refuse=_no_floats if name == "mosaic_gpu" else _accepts)
    for platform in ("cuda", "tpu", "cpu"):
        chosen = _explained(op, platform).implementation
        ran = [] if chosen == "reference" else [chosen]
        with kernels.expect(*ran):
            _lower(op, _X, platform)


def _accepts(*avals, **params):
    return None


def test_supports_and_the_table_know_whole_array_kernels(kernels):
    assert (
        "no whole-array kernel" in jt.supports("scan", "tpu", _X, 1, jt.add).whole_array
    )
    kernels.add("tpu")
    kernels.add("triton", refuse=_no_floats)
    assert jt.supports("scan", "tpu", _X, 1, jt.add).whole_array is None
    assert "integers" in jt.supports("scan", "triton", _X, 1, jt.add).whole_array
    rows = {r.split(" | ")[0][2:]: r for r in jt.support_table().splitlines()}
    assert rows["scan add"].endswith("| tpu, reference |")
    assert rows["reduce add, int32"].endswith("| triton, tpu, reference |")
    assert rows["cast float32 to bfloat16"].endswith("| reference |")


def test_in_a_kernel_body_another_backend_is_refused(kernels):
    kernels.add("tpu")
    triton = jt.pallas_lowering._registry.BACKENDS["triton"]
    params = dict(_only(jt.reduce)[1], implementation="tpu")
    sentence = triton.why_not(jt.primitives.reduce_p, *_only(jt.reduce)[0], **params)
    assert "implementation='tpu' is another backend's" in sentence
    params["implementation"] = "triton"
    assert (
        triton.why_not(jt.primitives.reduce_p, *_only(jt.reduce)[0], **params) is None
    )


def _only(call):
    """The abstract operands and the parameters of the one tile op of a call."""
    x = np.zeros((64, 128), np.float32)
    (eqn,) = jax.make_jaxpr(lambda x: call(x, 0, jt.add))(x).eqns
    return [v.aval for v in eqn.invars], eqn.params


_ABSENT = """
    import sys
    sys.modules["jaxtile.pallas_lowering.triton"] = None
    import jax, jaxtile as jt
    x = jax.ShapeDtypeStruct((8, 128), "float32")
    total = lambda x, name=None: jt.reduce(x, 0, jt.add, implementation=name)
    jax.jit(total).trace(x).lower(lowering_platforms=("cuda",))
    try:
        jax.eval_shape(lambda x: total(x, "triton"), x)
    except jt.errors.UnsupportedOnBackend as error:
        assert "triton cannot be imported" in str(error), error
        print("refused")
"""
_LAZY = """
    import sys
    import jax, jax.numpy as jnp, jaxtile as jt
    jax.jit(lambda x: jt.scan(x, 0, jt.add))(jnp.ones(8))
    jt.reduce(jnp.ones(8), 0, jt.add)
    assert "jax.experimental.pallas" not in sys.modules
    assert not any(f"jaxtile.pallas_lowering.{n}" in sys.modules
                   for n in jt.pallas_lowering.NAMES)
    print("refused")
"""


@pytest.mark.parametrize("code", [_ABSENT, _LAZY], ids=["absent", "lazy"])
def test_in_a_fresh_process(code):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"
