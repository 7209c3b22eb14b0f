"""Static cycles of TPU kernels, compiled by libtpu on a machine without a TPU.

`python benchmarks/tpu_schedule.py` writes `benchmarks/results/tpu.json` and `tpu.md`. The
compiler's schedule says how many cycles a kernel takes from block to result, stalls of its
units included, and nothing of the time that memory takes. A loop's body counts once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

_DUMP = Path(tempfile.mkdtemp(prefix="tpu_schedule_"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# libtpu reads it once, when it is loaded.
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={_DUMP} --xla_jf_dump_llo_text=true"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import jaxtile as jt  # noqa: E402

RESULTS = Path(__file__).parent / "results"
CHIPS = {
    "v5e": ("v5e:2x2", "TPU v5 lite"),
    "v6e": ("v6e:2x2", "TPU v6 lite"),
    "v7x": ("tpu7x:2x2x1", "TPU7x"),
}
_KERNEL = re.compile(r'%([\w.-]+) = .*custom_call_target="tpu_custom_call"')
COMMAND = "python benchmarks/tpu_schedule.py"
_SCHEDULES = "*pre-delay_hlo-static-per-bundle-utilization.txt"


def compiled(fn, args, chip):
    """A function compiled for one core of a chip."""
    topology, kind = CHIPS[chip]
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    device = jax.sharding.SingleDeviceSharding(found.devices[0])
    jitted = jax.jit(fn, in_shardings=device, out_shardings=device)
    stand_in = jax.sharding.AbstractDevice(kind, num_cores=1, platform="tpu")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), auto, abstract_device=stand_in)
    with jax.sharding.use_abstract_mesh(mesh):
        return jitted.trace(*args).lower(lowering_platforms=("tpu",)).compile()


def cycles(fn, args, chip):
    """What a function's schedules add up to, the kernels' share, and whether it loops."""
    for path in _DUMP.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    begin = time.perf_counter()
    program = compiled(fn, args, chip).as_text() or ""
    seconds = time.perf_counter() - begin
    counts: dict[str, int] = {}
    for path in _DUMP.glob(_SCHEDULES):
        name = path.name.split("-")[1]
        lines = path.read_text().splitlines()
        rows = sum(re.match(r"\s*\d", line) is not None for line in lines)
        if not name.startswith("<late"):
            counts[name] = counts.get(name, 0) + rows
    kernels = [n for name, n in counts.items() if name in _KERNEL.findall(program)]
    return {
        "cycles": sum(counts.values()),
        "in_kernels": sum(kernels),
        "loops": " while(" in program,
        "compile_seconds": round(seconds, 1),
    }


def block(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def kernel(body, out):
    """A kernel of one block."""
    return pl.pallas_call(body, out_shape=out)


def _native_sum(axis, shape):
    out = tuple(1 if d == axis else s for d, s in enumerate(shape))

    def body(x_ref, o_ref):
        o_ref[...] = jnp.sum(x_ref[...], axis, keepdims=True)

    return kernel(body, block(*out))


def _double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0


TALL, WIDE = (2048, 128), (128, 2048)


def _ours(op, axis, reducer, **params):
    def call(*leaves):
        element = leaves[0] if len(leaves) == 1 else leaves
        fn = jt.reduce if op == "reduce" else jt.scan
        return fn(element, axis, reducer, implementation="tpu", **params)

    return call


def _reference(op, axis, reducer, **params):
    def call(*leaves):
        element = leaves[0] if len(leaves) == 1 else leaves
        fn = jt.reduce if op == "reduce" else jt.scan
        return fn(element, axis, reducer, implementation="reference", **params)

    return call


def _in_body(op, axis, reducer, shape, leaves=1, **params):
    """Ours on values that a user's kernel has loaded."""
    fn = jt.reduce if op == "reduce" else jt.scan
    length = (shape[1 - axis],) if op == "reduce" else shape

    def body(*refs):
        values = [ref[...] for ref in refs[:leaves]]
        element = values[0] if leaves == 1 else tuple(values)
        refs[leaves][...] = fn(element, axis, reducer, **params)

    return kernel(body, block(*length))


def _products():
    """The update of a block in a kernel's body beside jnp.dot."""
    out = block(256, 256)
    for dtype, precision in (
        ("bfloat16", None),
        ("float32", jax.lax.Precision.HIGHEST),
    ):
        args = block(256, 512, dtype=dtype), block(512, 256, dtype=dtype)

        def ours(a_ref, b_ref, o_ref):
            o_ref[...] = jt.mma(a_ref[...], b_ref[...], jnp.zeros_like(o_ref))

        def theirs(a_ref, b_ref, o_ref, precision=precision):
            options: Any = dict(precision=precision, preferred_element_type=jnp.float32)
            o_ref[...] = jnp.dot(a_ref[...], b_ref[...], **options)

        base = kernel(theirs, out), args, "`jnp.dot` in a kernel"
        yield (
            f"mma {dtype}, in a kernel's body",
            1,
            kernel(ours, out),
            args,
            base,
            1.1,
        )


def _order():
    """Ordering in a kernel's body beside XLA's own; no more rows than neither loops over."""
    square, rows = (block(256, 256),), (block(256, 128),)

    def first(x_ref, values_ref, indices_ref):
        values_ref[...], indices_ref[...] = jt.topk(x_ref[...], 1, 8)

    def ordered(x_ref, o_ref):
        o_ref[...] = jt.sort(x_ref[...], 1)

    theirs = lambda x: jax.lax.top_k(x, 8), square, "`lax.top_k` by XLA"
    out = [block(256, 8), block(256, 8, dtype="int32")]
    yield ("topk of 8, in a kernel's body", 1, kernel(first, out), square, theirs, 0.4)
    theirs = lambda x: jax.lax.sort(x, dimension=1), rows, "`lax.sort` by XLA"
    yield ("sort, in a kernel's body", 1, kernel(ordered, *rows), rows, theirs, 0.4)


def against_kernels(chips):
    """Ours beside what a kernel costs at least; all are kernels of one block."""
    fixed: Any = dict(policy="fixed_tree")
    add, pair = (block(*WIDE),), (block(*WIDE),) * 2
    native = "`jnp.sum` in a kernel"
    double = kernel(_double, block(*WIDE)), add, "`x * 2` in a kernel"
    cases = [
        ("reduce add, fixed_tree", 0, _ours("reduce", 0, jt.add, **fixed), add)
        + ((_native_sum(0, WIDE), add, native), 1.9),
        (
            "reduce add, fixed_tree",
            1,
            _ours("reduce", 1, jt.add, **fixed),
            (block(*TALL),),
        )
        + ((_native_sum(1, TALL), (block(*TALL),), native), 1.3),
        ("scan add", 0, _ours("scan", 0, jt.add), add) + (double, 2.1),
        ("scan affine", 0, _ours("scan", 0, jt.affine), pair) + (double, 4.0),
    ]
    bodies = [
        _in_body("reduce", 0, jt.add, WIDE, policy="fixed_tree"),
        _in_body("reduce", 1, jt.add, TALL, policy="fixed_tree"),
        _in_body("scan", 0, jt.add, WIDE),
        _in_body("scan", 0, jt.affine, WIDE, 2),
    ]
    cases += [
        (f"{name}, in a kernel's body", axis, call, *rest)
        for (name, axis, _, *rest), call in zip(cases, bodies, strict=True)
    ]
    cases += [*_products(), *_order()]
    for name, axis, ours, args, (base, base_args, base_name), most in cases:
        for chip in chips:
            mine = cycles(ours, args, chip)["in_kernels"]
            found = cycles(base, base_args, chip)
            theirs = found["in_kernels"] or found["cycles"]
            yield {
                "op": name,
                "shape": list(args[0].shape),
                "axis": axis,
                "chip": chip,
                "ours": mine,
                "baseline": base_name,
                "baseline_cycles": theirs,
                "ratio": round(mine / theirs, 2),
                "target": most,
            }


_ELEMENTS = {"affine": 2}
_OPS = [
    ("reduce", "unordered_tree"),
    ("reduce", "fixed_tree"),
    ("reduce", "fold_left"),
    ("scan", "ordered_tree"),
    ("scan", "fixed_tree"),
    ("scan", "fold_left"),
]


def against_xla(chip, names):
    """Ours beside XLA's own realisation of the reference."""
    for name in names:
        reducer = getattr(jt, name)
        for op, policy in _OPS:
            if policy == "unordered_tree" and not reducer.laws.commutative:
                continue
            # Along the lanes XLA takes a minute to compile some, so one reducer stands
            # for all.
            for axis, shape in ((0, WIDE), (1, TALL))[: 1 + (name == "add")]:
                args = (block(*shape),) * _ELEMENTS.get(name, 1)
                ours = cycles(_ours(op, axis, reducer, policy=policy), args, chip)
                xla = cycles(_reference(op, axis, reducer, policy=policy), args, chip)
                yield {
                    "op": f"{op} {name}, {policy}",
                    "shape": list(shape),
                    "axis": axis,
                    "chip": chip,
                    "ours": ours,
                    "xla": xla,
                }


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def report(found):
    """The results as markdown."""
    kernels = _table(
        [
            "op",
            "shape",
            "axis",
            "chip",
            "ours",
            "baseline",
            "cycles",
            "ratio",
            "at most",
        ],
        [
            [
                r["op"],
                "×".join(map(str, r["shape"])),
                r["axis"],
                r["chip"],
                r["ours"],
                r["baseline"],
                r["baseline_cycles"],
                r["ratio"],
                r["target"] if r["ratio"] <= r["target"] else f"{r['target']} (missed)",
            ]
            for r in found["kernels"]
        ],
    )
    xla = _table(
        ["op", "shape", "axis", "ours", "XLA", "ours, compile s", "XLA, compile s"],
        [
            [
                r["op"],
                "×".join(map(str, r["shape"])),
                r["axis"],
                r["ours"]["cycles"],
                f"{r['xla']['cycles']}{' in a loop' if r['xla']['loops'] else ''}",
                r["ours"]["compile_seconds"],
                r["xla"]["compile_seconds"],
            ]
            for r in found["xla"]
        ],
    )
    return (
        f"Static cycles of libtpu {found['libtpu']} with jax {found['jax']}, float32, no "
        f"TPU at hand: `{COMMAND}`. Stalls of the units count, memory traffic does not, "
        "and a loop's body counts once.\n\n"
        f"Kernels alone:\n\n{kernels}\n\n"
        "Whole programs on v5e beside XLA's own code for the reference. Where XLA loops, "
        "its count is that of one step, and the two do not compare:\n\n"
        f"{xla}\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument(
        "--reducers",
        default="add,maximum,welford,affine",
        help="those to compare with XLA's code; none keeps the results of before",
    )
    options = parser.parse_args()
    found = {
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu"),
        "kernels": [],
        "xla": [],
    }
    for row in against_kernels(options.chips.split(",")):
        found["kernels"].append(row)
        print(row, flush=True)
    if options.reducers:
        for row in against_xla("v5e", options.reducers.split(",")):
            found["xla"].append(row)
            print(row, flush=True)
    else:
        found["xla"] = json.loads((RESULTS / "tpu.json").read_text())["xla"]
    (RESULTS / "tpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "tpu.md").write_text(report(found))


if __name__ == "__main__":
    main()
