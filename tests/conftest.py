"""Settings that must stand before jax starts, and what the tests share."""

import functools
import os

_EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "tpu" not in os.environ["JAX_PLATFORMS"]:
    # libtpu serves as a compiler only: it must not look for a TPU, nor lock it, since
    # parallel test processes each load it.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EIGHT_DEVICES}"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Compiling takes longer than any deadline, and a run must not depend on luck.
hypothesis.settings.register_profile("jaxtile", deadline=None, derandomize=True)
hypothesis.settings.load_profile("jaxtile")


@functools.cache
def _why_missing(platform: str) -> str | None:
    """The reason why there is no such device, None where there is one."""
    try:
        jax.devices(platform)
    except RuntimeError as error:
        asked = os.environ["JAX_PLATFORMS"]
        return f"no {platform} with JAX_PLATFORMS={asked}: {str(error).splitlines()[0]}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for platform in ("gpu", "tpu"):
        if item.get_closest_marker(platform) and (reason := _why_missing(platform)):
            pytest.skip(reason)


@pytest.fixture
def x64():
    """64-bit types for one test; elsewhere jax's default, 32 bits, stands."""
    with jax.enable_x64(True):
        yield
