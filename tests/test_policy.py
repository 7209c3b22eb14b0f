"""Order policies: what they permit, how they compose, and the errors."""

import jax
import jax.numpy as jnp
import pytest

import jaxtile as jt
from jaxtile.errors import ContractError, PolicyError
from jaxtile.policy import ALL, Transform, as_policy

_REGROUP, _PERMUTE = Transform.REGROUP, Transform.PERMUTE
_PERMITS = {
    "unordered_tree": (True, True),
    "ordered_tree": (True, False),
    "fixed_tree": (False, False),
    "fold_left": (False, False),
    "fold_right": (False, False),
}


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_permits(policy):
    assert (policy.permits(_REGROUP), policy.permits(_PERMUTE)) == _PERMITS[policy.name]
    assert policy.permits(Transform.NOTHING)
    assert policy.permits(_REGROUP | _PERMUTE) == (policy.name == "unordered_tree")


@pytest.mark.parametrize("policy", ALL, ids=repr)
def test_names_stand_for_policies(policy):
    assert as_policy(policy.name) is policy
    assert as_policy(policy) is policy
    assert repr(policy) == policy.name
    assert getattr(jt.policy, policy.name) is policy


def test_policies_are_values():
    assert len({hash(p) for p in ALL}) == len(ALL)
    jax.tree.map(hash, ALL)
    with pytest.raises(AttributeError):
        ALL[0].name = "other"


@pytest.mark.parametrize("a", ALL, ids=repr)
@pytest.mark.parametrize("b", ALL, ids=repr)
def test_meet_is_the_stricter(a, b):
    if a != b and a.permitted == b.permitted:
        with pytest.raises(PolicyError, match="two policies that one computation"):
            a.meet(b)
        return
    met = a.meet(b)
    assert met == b.meet(a)
    assert met in (a, b)
    assert a.permits(met.permitted)
    assert b.permits(met.permitted)


@pytest.mark.parametrize("wrong", ["tree", "", None, 3, "FOLD_LEFT"])
@pytest.mark.parametrize("op", [jt.reduce, jt.scan])
def test_unknown_policy(op, wrong):
    with pytest.raises(PolicyError, match="policy: expected one of unordered_tree, "):
        op(jnp.ones(3), 0, jt.add, policy=wrong)


_NO_LAWS = jt.Reducer(merge=lambda a, b: a - b, name="minus")
_ASSOCIATIVE = jt.Reducer(merge=lambda a, b: b, laws=jt.Laws(True), name="right")


@pytest.mark.parametrize("op", [jt.reduce, jt.scan])
@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        ("unordered_tree", "associative, commutative"),
        ("ordered_tree", "associative"),
        ("fixed_tree", "associative"),
    ],
)
def test_a_tree_needs_laws(op, policy, missing):
    sentence = f"{op.__name__}: expected a reducer with the laws {missing} under policy"
    with pytest.raises(ContractError, match=f'{sentence}.*policy="fold_left"'):
        op(jnp.ones(3), 0, _NO_LAWS, policy=policy)


@pytest.mark.parametrize("reducer", [_ASSOCIATIVE, jt.affine, jt.segmented(jt.add)])
def test_permuting_needs_commutativity(reducer):
    x = jnp.ones(3)
    pairs = {jt.affine: (x, x)}.get(reducer, (x > 0, x))
    element = x if reducer is _ASSOCIATIVE else pairs
    with pytest.raises(ContractError, match='commutative.*use policy="ordered_tree"'):
        jt.reduce(element, 0, reducer)
    jt.reduce(element, 0, reducer, policy="ordered_tree")


def test_folds_need_no_law():
    x = jnp.array([1, 2, 3])
    assert jt.reduce(x, 0, _NO_LAWS, policy="fold_left", init=0) == -6
    assert jt.reduce(x, 0, _NO_LAWS, policy="fold_right", init=0) == 2
    assert jt.reduce(x, 0, _NO_LAWS, policy="fold_left") == -4
