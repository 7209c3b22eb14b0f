"""One small launch of each GPU kernel, for a memory checker.

compute-sanitizer --tool memcheck python tests/device/small_run.py
compute-sanitizer --tool racecheck python tests/device/small_run.py

Arguments choose backends: `small_run.py triton`. Without any, both run.
"""

import sys

import jax
import numpy as np

import jaxtile as jt

CALLS = {
    "rows": lambda x: jt.reduce(x, 1, jt.welford, policy="fixed_tree"),
    "columns": lambda x: jt.reduce(x, 0, jt.argmax, policy="fixed_tree"),
    "staged fold": lambda x: jt.reduce(x, 1, jt.add, policy="fold_left"),
    "scan of rows": lambda x: jt.scan(x, 1, jt.add, policy="fixed_tree"),
    "scan of columns": lambda x: jt.scan(x, 0, jt.add, direction="suffix"),
    "chain of columns": lambda x: jt.scan(x, 0, jt.add, policy="fold_left"),
    "chain": lambda x: jt.scan(x, 1, jt.welford, policy="fold_left"),
}


def main() -> None:
    """Run every call on ragged rows, then on long ones that are cut."""
    rng = np.random.default_rng(0)
    for shape in ((5, 1001), (1, 40003), (3001, 3)):
        x = rng.standard_normal(shape, dtype=np.float32)
        for name, call in CALLS.items():
            for backend in sys.argv[1:] or ("mosaic_gpu", "triton"):
                print(shape, name, backend, end=" ", flush=True)
                with jt.use_implementation(backend):
                    jax.block_until_ready(jax.jit(call)(x))
                print("ran", flush=True)


if __name__ == "__main__":
    main()
