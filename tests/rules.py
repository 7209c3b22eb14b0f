"""Running a backend's own functions for our primitives in plain jax."""

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtile.primitives._scalar import as_closed, inner_jaxpr


def replaced(rules, fn):
    """`fn` with a function in the place of each primitive in `rules`; gives its leaves.

    Interpret mode runs a primitive's reference in a kernel: this runs a backend's own.
    """

    def run(*args):
        return _replay(rules, *as_closed(jax.make_jaxpr(fn)(*args)), args)

    return run


def through(rules, fn, *args, jit=True):
    """The leaves of `fn(*args)` with its primitives replaced.

    Without `jit` the functions get the arrays themselves.
    """
    run = replaced(rules, fn)
    return jax.jit(run)(*args) if jit else run(*map(jnp.asarray, args))


def _replay(rules, jaxpr, consts, args):
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values, inner = [read(v) for v in eqn.invars], inner_jaxpr(eqn)
        if eqn.primitive in rules:
            params = {k: v for k, v in eqn.params.items() if k != "implementation"}
            outs = rules[eqn.primitive](*values, **params)
        elif inner is not None:
            outs = _replay(rules, *as_closed(inner), values)
        else:
            outs = eqn.primitive.bind(*values, **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]
