"""The laws of set encoding, as checks for any encoder::

    consistency      z(chunk_1, ..., chunk_C) = z(X)               for every partition of X
    permutation      z(π X) = z(X)                                 for every order of the elements
    merge            state(X) + state(Y) = state(X ∪ Y)            commutative, associative, with a zero
    slots            z with slots π S = π z with slots S           for every order of the slots
    exact gradient   ∂L/∂θ of `encode(gradient="exact")` = ∂L/∂θ   for every parameter of encoder and head
    unbiased         E[∂L/∂θ of `encode(gradient="unbiased")`] = ∂L/∂θ

Equality is judged as flash attention judges it: the result in working precision may be at most twice as far from a
float64 reference as the one-shot result is (plus a few units in the last place: the one-shot result may be exact by chance).
A check returns the largest error that it measured, relative to the largest value, and raises `LawViolation` with the
numbers in its message. All checks work on an eval-mode copy: your model is not touched.
"""

from setstream.testing.gradients import check_exact_gradient, check_unbiased_gradient, z_bound
from setstream.testing.laws import (
    check_merge,
    check_mini_batch_consistency,
    check_permutation_invariance,
    check_slot_equivariance,
    random_partition,
)

__all__ = ["check_exact_gradient", "check_unbiased_gradient", "random_partition", "z_bound"]
__all__ += ["check_merge", "check_mini_batch_consistency", "check_permutation_invariance", "check_slot_equivariance"]
