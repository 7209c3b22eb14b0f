"""The fence: the only module that may import `jax._src`.

It hides what jax keeps private and what differs between 0.10.2, 0.11 and 0.12.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.backend
from jax._src import config as _config
from jax._src import core as _core
from jax._src import custom_partitioning as _partitioning
from jax._src import custom_partitioning_sharding_rule as _rules
from jax._src import sharding_impls as _sharding_impls
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir import ir  # pyright: ignore
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Primitive
from jax.interpreters import mlir


def sharding_spec(aval: Any) -> tuple:
    """The explicit mesh axes of each dimension; all None off an explicit mesh."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return (None,) * aval.ndim
    spec = tuple(sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def varying_axes(aval: Any) -> frozenset:
    """The manual mesh axes along which a value varies inside `shard_map`."""
    mat = getattr(aval, "mat", None)
    return mat.varying if mat is not None else frozenset()


def out_aval(shape: Sequence[int], dtype: Any, spec: Sequence, operands: Sequence):
    """An abstract output: sharded by `spec`, varying where any operand varies."""
    like = operands[0]
    sharding = getattr(like, "sharding", None)
    if sharding is not None and sharding.mesh.empty:
        sharding = None
    if sharding is not None:
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    varying = frozenset().union(*map(varying_axes, operands))
    if not varying:
        return _core.ShapedArray(tuple(shape), dtype, sharding=sharding)
    mat = _core.ManualAxisType(varying=varying)  # pyright: ignore
    return _core.ShapedArray(
        tuple(shape), dtype, sharding=sharding, manual_axis_type=mat
    )


def align_varying(values: Sequence[Any]) -> list[Any]:
    """Cast every value to vary along the union of the manual axes of all of them."""
    axes = [varying_axes(_core.typeof(v)) for v in values]
    union = frozenset().union(*axes)
    return [
        _core.pvary(v, tuple(sorted(union - have, key=str))) if union - have else v
        for v, have in zip(values, axes, strict=True)
    ]


def lower_plain(fn: Callable[..., list]) -> Callable:
    """A lowering rule that traces `fn`, a reference or a kernel, as plain jax.

    Its loops and reshapes know nothing of meshes, so it is traced without
    the operands' shardings; the outputs then carry those of the abstract evaluation.
    """
    rule = mlir.lower_fun(fn, multiple_results=True)

    def plain(aval):
        return _core.ShapedArray(aval.shape, aval.dtype)

    def lower(ctx, *args, **params):
        bare = ctx.replace(
            avals_in=tuple(map(plain, ctx.avals_in)),
            avals_out=tuple(map(plain, ctx.avals_out)),
        )
        with no_mesh():
            outs = rule(bare, *args, **params)
        return [
            _constrain(ctx, out, aval)
            for out, aval in zip(outs, ctx.avals_out, strict=True)
        ]

    return lower


def no_mesh() -> Any:
    """A context without a mesh, which still says what device a kernel is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """`no_mesh` where a kernel is traced in `shard_map`, on values without manual axes."""
    with no_mesh(), _config._check_vma(False):
        yield


def _constrain(ctx, out, aval):
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or aval.ndim == 0:
        return out
    value = out[0] if isinstance(out, (tuple, list)) else out
    return _mlir.lower_with_sharding_in_types(ctx, value, aval)


def default_platform() -> str:
    """The platform that jit lowers for where nothing else is said."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    version = jax.extend.backend.get_backend().platform_version
    return "rocm" if "rocm" in version.lower() else "cuda"


def placement(ctx: Any) -> tuple[Any, str | None]:
    """Where the arrays of a lowering are: (mesh, why a kernel cannot run on it).

    The mesh is None where the arrays are already those of one device.
    """
    module = ctx.module_context
    where = module.axis_context
    if isinstance(where, _sharding_impls.SPMDAxisContext):
        if where.manual_axes == frozenset(where.mesh.axis_names):
            return None, None
        return None, (
            "some mesh axes are manual in shard_map and some are not; name all of them "
            "in axis_names="
        )
    if getattr(where, "num_devices", 1) == 1:
        return None, None
    if module.lowering_parameters.for_export:
        return None, (
            "an exported module cannot hold a kernel for several devices; put the call "
            "in jax.shard_map"
        )
    meshes = [a.sharding.mesh for a in ctx.avals_in]
    meshes.append(jax.sharding.get_abstract_mesh())
    mesh = next((m for m in meshes if not m.empty), None)
    if mesh is not None and mesh.size == where.num_devices:
        return mesh, None
    return None, (
        "the mesh is not known where the call is traced; trace it under jax.set_mesh, or "
        "pass arrays that are sharded already"
    )


def lower_partitioned(
    ctx: Any, args: Sequence, mesh: Any, partition: Callable, infer: Callable, rule: Any
) -> list:
    """Lower to what `partition` makes of the shardings that the partitioner chooses.

    Args:
        ctx: the lowering's context.
        args: the operands' values.
        mesh: the mesh of `placement`.
        partition: as `jax.experimental.custom_partitioning` takes it.
        infer: likewise, `infer_sharding_from_operands`, for GSPMD.
        rule: likewise, the `SdyShardingRule`, for Shardy.
    """

    def spec(sharding, rank):
        found = _sharding_impls.parse_flatten_op_sharding(sharding, mesh)[0]
        entries = tuple(found) + (None,) * (rank - len(found))
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))

    avals = (ctx.avals_in, ctx.avals_out)
    ins, outs = (jax.tree.structure((0,) * len(side)) for side in avals)
    # custom_partitioning itself wants devices, which lowering elsewhere does not have.
    info = _partitioning._ShardingCallbackInfo(
        None, partition, spec, ins, outs, infer, ctx.module_context, mesh, ()
    )
    key = str(id(info))
    _partitioning._sharding_callbacks[key.encode()] = info
    # The executable keeps the callbacks alive, which are found by a weak reference.
    ctx.module_context.add_keepalive(info)
    types = [_mlir.aval_to_ir_type(ctx.module_context, a) for a in ctx.avals_out]
    call = hlo.CustomCallOp(
        types,
        list(args),
        call_target_name=ir.StringAttr.get("CustomSPMDPartitioning"),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=_mlir.i32_attr(2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(key),
        operand_layouts=None,
        result_layouts=None,
    )
    call.attributes["sdy.sharding_rule"] = _rules.sdy_sharding_rule_to_mlir(
        rule, [v.type for v in args], types
    )
    return [
        _constrain(ctx, v, a) for v, a in zip(call.results, ctx.avals_out, strict=True)
    ]


def iota_like(like: Any, dtype: Any, axis: int):
    """Positions along `axis`, sharded and varying as `like`."""
    aval = _core.typeof(like)
    sharding = aval.sharding if not aval.sharding.mesh.empty else None
    place = jax.lax.broadcasted_iota(dtype, aval.shape, axis, out_sharding=sharding)
    return align_varying([place, like])[0]


class Hooks(NamedTuple):
    """One Pallas backend's private table of rules.

    Args:
        register: `(primitive, rule, scratch_bytes)`: `rule(ctx, *args, **params)`, and
            the shared memory that it uses in each warpgroup of a Mosaic GPU kernel, as
            `(avals, params, several) -> bytes`, where `several` says whether there may
            be more than one warpgroup.
        trace: `fn -> rule`, where `fn(*values, **params) -> [value]` is plain jax.
        knows: whether the backend has a rule for a primitive.
        unavailable: why its whole-array kernels do not run on this process's devices,
            or None; where there is no device, one that suits is assumed.
    """

    register: Callable[..., None]
    trace: Callable[[Callable], Callable]
    knows: Callable[[Any], bool]
    unavailable: Callable[[], str | None]


def _cuda_from(least: float) -> Callable[[], str | None]:
    def unavailable():
        try:
            devices = jax.local_devices(backend="cuda")
        except RuntimeError:
            return None
        found = min(float(d.compute_capability) for d in devices)
        if found >= least:
            return None
        return (
            f"it needs compute capability {least}, and a device here has {found}; use "
            "a newer device"
        )

    return unavailable


def _triton_unavailable() -> str | None:
    """Pallas Triton compiles for a device that it must know, from jax 0.11 on."""
    try:
        from jax._src.pallas.triton import gpu_info  # pyright: ignore
    except ImportError:
        return _cuda_from(8.0)()
    try:
        gpu_info.get_gpu_info()
    except (ValueError, RuntimeError):
        return (
            "it compiles for a known device, and there is none; lower under "
            "jax.sharding.use_abstract_mesh with an AbstractDevice"
        )
    return _cuda_from(8.0)()


def triton() -> Hooks:
    """The table of Pallas Triton."""
    from jax._src.pallas.triton import lowering

    def register(primitive, rule, scratch_bytes=None):
        lowering.register_lowering(primitive)(rule)

    def trace(fn):
        rule = lowering.lower_fun(fn, multiple_results=True)

        def lower(ctx, *args, **params):
            # A literal operand is no value of the module yet.
            pairs = zip(args, ctx.avals_in, strict=True)
            values = [lowering._ensure_ir_value(v, aval) for v, aval in pairs]
            return rule(ctx, *values, **params)

        return lower

    knows = lowering.triton_lowering_rules.__contains__
    return Hooks(register, trace, knows, _triton_unavailable)


def triton_associative(name: str, keeps_axis: bool, plain: Callable):
    """A primitive that is `tt.scan` or `tt.reduce` with a region of its own.

    Args:
        name: "scan" or "reduce".
        keeps_axis: the results have the operands' shape.
        plain: `(*arrays, combine, axis, reverse) -> [array]`, which runs it elsewhere.

    Returns:
        The primitive, with parameters `combine(a, b)` on lists of scalars, `axis`,
        and `reverse`.
    """
    from jax._src.lib.triton import dialect  # pyright: ignore
    from jax._src.pallas.triton import lowering

    primitive = Primitive(f"triton_{name}")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def _(*avals, axis, **params):
        shape = avals[0].shape
        if not keeps_axis:
            shape = shape[:axis] + shape[axis + 1 :]
        return [_core.ShapedArray(shape, v.dtype) for v in avals]

    @lowering.register_lowering(primitive)
    def _(ctx, *args, combine, axis, reverse):
        k = len(args)
        scalars = [jax.ShapeDtypeStruct((), v.dtype) for v in ctx.avals_in]
        closed = jax.make_jaxpr(lambda *v: combine(v[:k], v[k:]))(*scalars, *scalars)
        jaxpr: Any = getattr(closed, "jaxpr", closed)
        make = {"scan": dialect.ScanOp, "reduce": dialect.ReduceOp}[name]
        op = make(list(args), axis, reverse) if keeps_axis else make(list(args), axis)
        types = [ir.RankedTensorType(v.type).element_type for v in args]
        entry = op.regions[0].blocks.append(*types, *types)
        with ir.InsertionPoint.at_block_begin(entry):
            done = lowering.lower_jaxpr_to_triton_ir(
                ctx.context, jaxpr, None, *entry.arguments
            )
            (dialect.scan_return if keeps_axis else dialect.reduce_return)(done)
        return list(op.result)

    rule = mlir.lower_fun(plain, multiple_results=True)
    mlir.register_lowering(primitive, rule)
    primitive.def_impl(
        lambda *args, **params: jax.jit(lambda *v: plain(*v, **params))(*args)
    )
    return primitive


def tpu() -> Hooks:
    """The table of Pallas TPU, for the TensorCore."""
    from jax._src.pallas.mosaic import core, lowering

    def register(primitive, rule, scratch_bytes=None):
        lowering.register_lowering_rule(primitive)(rule)

    rules = lowering.lowering_rules[core.CoreType.TC]
    return Hooks(register, lowering.lower_fun, rules.__contains__, lambda: None)


MOST_WARPGROUPS = 8
MOSAIC_GPU_LINE = tuple(map(int, jax.__version__.split(".")[:2]))


def mosaic_gpu() -> Hooks:
    """The table of Pallas Mosaic GPU, in Lane and in Warpgroup semantics.

    Shared memory is sized from the kernel's jaxpr before any rule runs, hence
    `scratch_bytes`; that jaxpr does not say how many warpgroups there are, only whether
    there are several.
    """
    from jax._src.pallas.mosaic_gpu import core, lowering
    from jax.experimental.mosaic.gpu import LoweringSemantics

    tables = [
        lowering.mosaic_lowering_rules[k]
        for k in (core.LANExWG_SEMANTICS, core.WGxWG_SEMANTICS)
    ]

    def register(primitive, rule, scratch_bytes=None):
        def resources(ctx, *avals, **params):
            several = ctx.axis_names.wg is not None
            most = MOST_WARPGROUPS if several else 1
            each = scratch_bytes(avals, params, several) if scratch_bytes else 0
            return lowering.Resources(smem_scratch_bytes=most * each)

        lowering._register_resource_estimator(primitive)(resources)
        for semantics in LoweringSemantics:
            lowering.register_lowering_rule(primitive, semantics)(rule)

    def trace(fn):
        # A list would be taken for one nested result.
        return lowering._lower_fun(lambda *xs, **params: tuple(fn(*xs, **params)))

    knows = lambda p: all(p in t for t in tables)  # noqa: E731
    return Hooks(register, trace, knows, _cuda_from(9.0))


def placed_like(value: Any, like: Any):
    """`value` resharded as `like` where both have one shape on an explicit mesh.

    A constant that vmap broadcasts has no sharding of its own.
    """
    want, have = _core.typeof(like), _core.typeof(value)
    if want.sharding.mesh.empty or have.shape != want.shape:
        return value
    if have.sharding == want.sharding or not want.sharding.mesh.explicit_axes:
        return value
    return jax.sharding.reshard(value, want.sharding)
