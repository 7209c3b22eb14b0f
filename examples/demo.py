"""What jaxtile does, shown and checked on measured data; `make demo` runs it.

The data come with scikit-learn: 30 measurements of each of 569 tumours, and 1797
handwritten digits of 8 by 8 pixels. Every claim is checked. The exit code is 1 if one
fails.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from sklearn.datasets import load_breast_cancer, load_digits

import jaxtile as jt

FAILED: list[str] = []


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def check(claim: str, holds: object) -> None:
    """Print a claim with its verdict, and remember it if it fails."""
    if not bool(holds):
        FAILED.append(claim)
    print(f"  [{'ok' if bool(holds) else 'FAILED'}] {claim}")


def same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


def worst(got: jax.Array, want: np.ndarray) -> float:
    """The largest error, relative to the largest of the wanted values."""
    gap = np.abs(np.asarray(got, np.float64) - want)
    return float(np.max(gap) / np.max(np.abs(want)))


def order(tumours: np.ndarray) -> None:
    title("1. A sum whose answer depends on the order")
    x = jnp.asarray(tumours.ravel(), jnp.float32)
    exact = math.fsum(np.asarray(x, np.float64))
    print(f"  {x.size} float32 numbers; their exact sum is {exact:.4f}")
    error = {}
    for policy in jt.policy.ALL:
        total = float(jt.reduce(x, 0, jt.add, policy=policy))
        error[policy.name] = abs(total - exact)
        print(f"  {policy.name:<15}{total:14.4f}   off by {error[policy.name]:.4f}")
    check(
        "the order changes the answer, and the tree is nearer than the fold",
        error["fixed_tree"] < error["fold_left"],
    )
    left = jt.reduce(x, 0, jt.add, policy="fold_left")
    check(
        "fold_left has the bits of a loop over the elements",
        same_bits(left, np.add.accumulate(np.asarray(x))[-1]),
    )


def tree_loop(x: np.ndarray) -> np.ndarray:
    """Neighbours are added level by level; an odd last one moves up unchanged."""
    while len(x) > 1:
        pairs = x[0 : len(x) // 2 * 2 : 2] + x[1::2]
        x = np.concatenate([pairs, x[len(x) // 2 * 2 :]])
    return x[0]


def pinned(tumours: np.ndarray) -> None:
    title("2. The policy that pins it")
    x = jnp.asarray(tumours, jnp.float32)

    def tree(v):
        return jt.reduce(v, -1, jt.add, policy="fixed_tree")

    whole = jax.jit(tree)(x)
    want = tree_loop(np.asarray(x).T)
    check("fixed_tree: the bits of its definition, in NumPy", same_bits(whole, want))
    for size in (1, 8, 100):
        part = jax.jit(tree)(x[:size])
        same = same_bits(part, whole[:size])
        check(f"fixed_tree: same bits in a batch of {size}", same)
    check("fixed_tree: same bits under vmap", same_bits(jax.vmap(tree)(x), whole))
    turned = jt.reduce(x.T, 0, jt.add, policy="fixed_tree")
    check("fixed_tree: same bits along the other axis", same_bits(turned, whole))
    plain = jnp.sum(x, axis=1) != jnp.sum(x.T, axis=0)
    print(f"  (jnp.sum: {int(plain.sum())} of {len(x)} rows change with the axis here)")


def moments(tumours: np.ndarray) -> None:
    title("3. Welford moments beside float64")
    x = jnp.asarray(tumours, jnp.float32)
    want = np.asarray(x, np.float64).var(axis=0, ddof=1)
    m = jt.reduce(x, 0, jt.welford)
    naive = (jnp.mean(x * x, 0) - jnp.mean(x, 0) ** 2) * len(x) / (len(x) - 1)
    ours = np.max(np.abs(np.asarray(m.variance(ddof=1)) / want - 1))
    theirs = np.max(np.abs(np.asarray(naive) / want - 1))
    print(f"  variance in float32, worst relative error of 30: {ours:.1e}")
    print(f"  E[x^2] - E[x]^2 in float32:                      {theirs:.1e}")
    check("the variance agrees with float64 to 1e-5", ours < 1e-5)
    mean = np.asarray(x, np.float64).mean(axis=0)
    check("the mean agrees with float64 to 1e-5", worst(m.mean, mean) < 1e-5)
    first = jt.reduce(x[:200], 0, jt.welford)
    rest = jt.reduce(x[200:], 0, jt.welford, init=first)
    error = np.max(np.abs(np.asarray(rest.variance(ddof=1)) / want - 1))
    check("so does a run continued from the state of the first 200", error < 1e-5)


def smooth(decay: jax.Array, x: jax.Array) -> jax.Array:
    """h_t = decay h_(t-1) + (1 - decay) x_t along the last axis."""
    return jt.linear_recurrence(decay, (1 - decay) * x, x.ndim - 1)


def smooth_loop(decay: float, x: np.ndarray) -> np.ndarray:
    """The same as a loop in float64."""
    h, out = np.zeros(x.shape[:-1]), []
    for t in range(x.shape[-1]):
        h = decay * h + (1 - decay) * x[..., t]
        out.append(h)
    return np.stack(out, -1)


def smoothing(digits: np.ndarray) -> None:
    title("4. Smoothing by linear_recurrence, and its gradient")
    x, step = jnp.asarray(digits, jnp.float32), 1e-4

    def loss(decay):
        return jnp.mean((smooth(decay, x)[:, :-1] - x[:, 1:]) ** 2)

    def loss_loop(decay):
        return np.mean((smooth_loop(decay, digits)[:, :-1] - digits[:, 1:]) ** 2)

    decay = jnp.float32(0.5)
    error = worst(smooth(decay, x), smooth_loop(0.5, digits))
    check(f"1797 pixel sequences agree with a float64 loop ({error:.0e})", error < 1e-5)
    slope = jax.jit(jax.grad(loss))
    want = (loss_loop(0.5 + step) - loss_loop(0.5 - step)) / (2 * step)
    got = float(slope(decay))
    print(f"  d loss / d decay at 0.5: {got:.4f}; by float64 differences: {want:.4f}")
    check("the gradient agrees to 1e-3", abs(got / want - 1) < 1e-3)
    for _ in range(60):
        decay = jnp.clip(decay - 0.01 * slope(decay), 0.0, 0.99)
    print(f"  predicting the next pixel: loss {loss_loop(0.5):.3f} at decay 0.5,")
    print(f"  {loss_loop(float(decay)):.3f} at the fitted decay {float(decay):.3f}")
    check("descent lowers the loss", loss_loop(float(decay)) < loss_loop(0.5))


def casting(tumours: np.ndarray) -> None:
    title("5. A cast that survives jit")
    x = jnp.asarray(tumours, jnp.float32)
    want = np.asarray(x).astype(jnp.bfloat16).astype(np.float32)

    def ours(v):
        return jt.cast(jt.cast(v, jnp.bfloat16), jnp.float32)

    def plain(v):
        return v.astype(jnp.bfloat16).astype(jnp.float32)

    kept = int(np.sum(np.asarray(jax.jit(plain)(x)) != want))
    print(f"  to bfloat16 and back, under jit, on {jax.default_backend()}:")
    print(f"  astype leaves {kept} of {x.size} values unrounded")
    check("cast rounds every value as ml_dtypes does", same_bits(ours(x), want))
    check("cast under jit does too", same_bits(jax.jit(ours)(x), want))
    try:
        jt.cast(x, jnp.float8_e4m3fn)
    except jt.errors.TileError as error:
        print(f"  refused: {error}")
        check("a cast to a storage format names quantize", "quantize" in str(error))
    else:
        check("a cast to a storage format is refused", False)


def kernel(digits: np.ndarray) -> None:
    title("6. The same operations in a Pallas kernel body")
    x, rows = jnp.asarray(digits, jnp.float32), 599

    def body(x_ref, p_ref, total_ref):
        v = x_ref[...]
        top = jt.reduce(v, 1, jt.maximum, keepdims=True)
        e = jt.exp(v - top)
        total = jt.reduce(e, 1, jt.add, policy="fixed_tree", keepdims=True)
        p_ref[...] = jt.cast(e / total, jnp.bfloat16)
        total_ref[...] = jt.reduce(v, 1, jt.add, policy="fixed_tree", keepdims=True)

    def block(width):
        return pl.BlockSpec((rows, width), lambda i: (i, 0))

    p, total = pl.pallas_call(
        body,
        grid=(len(x) // rows,),
        in_specs=[block(64)],
        out_specs=[block(64), block(1)],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((len(x), 1), jnp.float32),
        ],
        interpret=True,
    )(x)
    e = np.exp(digits - digits.max(1, keepdims=True))
    error = worst(p, e / e.sum(1, keepdims=True))
    check(f"softmax of each row, to bfloat16 rounding ({error:.1e})", error < 4e-3)
    outside = jt.reduce(x, 1, jt.add, policy="fixed_tree")
    check("a fixed_tree sum has the same bits outside", same_bits(total[:, 0], outside))


def report(digits: np.ndarray) -> None:
    title("7. What ran, and what runs where")
    x = jnp.asarray(digits, jnp.float32)

    def step(v):
        return jt.cast(jt.scan(v, 1, jt.maximum), jnp.bfloat16)

    found = jt.explain(step)(x)
    print(found)
    check("explain finds both operations", [e.op for e in found] == ["scan", "cast"])
    ran = {e.implementation for e in found}
    check("the reference ran them: plain jax", ran == {"reference"})
    counted = found.entries[0].bytes
    check("the scan reads and writes its array once", counted == 2 * x.nbytes)
    print(f"\n{jt.support_table()}\n")
    block = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    narrow = jt.supports("cast", "tpu", block, jnp.float16)
    print(f"  a cast to float16 in a TPU kernel: {narrow}")
    check("a refusal comes with its reason", not narrow and narrow.reason)


def main() -> int:
    tumours = np.asarray(load_breast_cancer(return_X_y=True)[0])
    digits = np.asarray(load_digits(return_X_y=True)[0])
    print(f"jaxtile {jt.__version__}, jax {jax.__version__}, {jax.default_backend()}")
    order(tumours)
    pinned(tumours)
    moments(tumours)
    smoothing(digits)
    casting(tumours)
    kernel(digits)
    report(digits)
    if FAILED:
        print(f"\n{len(FAILED)} checks failed:", *FAILED, sep="\n  ")
        return 1
    print("\nAll checks passed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
