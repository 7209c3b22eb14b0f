"""Running a backend's own functions for our primitives in plain jax."""

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtile.primitives._scalar import as_closed, inner_jaxpr


def through(rules, fn, *args, jit=True):
    """The leaves of `fn(*args)` with each primitive in `rules` replaced by a function.

    Without `jit` the functions get the arrays themselves.
    """

    def run(*args):
        return _replay(rules, *as_closed(jax.make_jaxpr(fn)(*args)), args)

    if jit:
        return jax.jit(run)(*args)
    return run(*map(jnp.asarray, args))


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
