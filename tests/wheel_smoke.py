"""Is the wheel whole? `make wheel-test` runs this where only the wheel is installed."""

import importlib.util
import os
import sysconfig
from pathlib import Path


def check_installed_files() -> None:
    site = Path(sysconfig.get_path("purelib"))
    stray = {"primitives", "pallas_lowering", "tests"} & set(os.listdir(site))
    assert not stray, f"top-level names that do not belong in site-packages: {stray}"
    for package in ("primitives", "pallas_lowering"):
        spec = importlib.util.find_spec(f"jaxtile.{package}")
        assert spec is not None, f"jaxtile.{package} is missing"
        assert Path(spec.origin or "").is_relative_to(site), spec.origin
    assert (site / "jaxtile" / "py.typed").is_file()


def check_computation() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxtile as jt

    @jax.jit
    def compute(x):
        narrow = jt.cast(x, jnp.bfloat16)
        return jt.reduce(x, 1, jt.add), jt.scan(x, 1, jt.add), narrow

    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    total, prefixes, narrow = compute(x)
    np.testing.assert_array_equal(total, x.sum(1))
    np.testing.assert_array_equal(prefixes, x.cumsum(1))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow.astype(np.float32), x)


if __name__ == "__main__":
    check_installed_files()
    check_computation()
    print("wheel: ok")
