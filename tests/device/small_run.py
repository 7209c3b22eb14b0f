"""One small launch of each GPU kernel, for a memory checker.

compute-sanitizer --tool memcheck python tests/device/small_run.py
compute-sanitizer --tool racecheck python tests/device/small_run.py
"""

import jax
import numpy as np

import jaxtile as jt

CALLS = {
    "rows": lambda x: jt.reduce(x, 1, jt.welford, policy="fixed_tree"),
    "columns": lambda x: jt.reduce(x, 0, jt.argmax, policy="fixed_tree"),
    "staged fold": lambda x: jt.reduce(x, 1, jt.add, policy="fold_left"),
    "scan of rows": lambda x: jt.scan(x, 1, jt.add, policy="fixed_tree"),
    "scan of columns": lambda x: jt.scan(x, 0, jt.add, direction="suffix"),
    "chain": lambda x: jt.scan(x, 1, jt.welford, policy="fold_left"),
}


def main() -> None:
    """Run every call on ragged rows, then on long ones that are cut."""
    rng = np.random.default_rng(0)
    for shape in ((5, 1001), (1, 40003), (3001, 3)):
        x = rng.standard_normal(shape, dtype=np.float32)
        for call in CALLS.values():
            for backend in ("mosaic_gpu", "triton"):
                with jt.use_implementation(backend):
                    jax.block_until_ready(jax.jit(call)(x))
        print(shape, *CALLS, flush=True)


if __name__ == "__main__":
    main()
