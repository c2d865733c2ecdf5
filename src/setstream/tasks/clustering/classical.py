"""The classical yardstick: expectation maximisation on every set by itself, best of several starts."""

import warnings

from torch import Tensor

from setstream._utils.optional import need


def em_nll(points: Tensor, clusters: int = 4, starts: int = 10, seed: int = 0) -> Tensor:
    """The NLL (B,) of each set's points (B, N, D) under a diagonal mixture that scikit-learn's EM fitted to that set.

    It is fitted to the very points that it is tested on, each set for hundreds of milliseconds; an amortised model sees each
    point once. Its number may lie below the oracle's: the best mixture for a sample fits it better than the one that made it.
    """
    mixture, exceptions = (need(f"sklearn.{name}", "tasks", "EM") for name in ("mixture", "exceptions"))
    found = []
    for own in points.double().cpu().numpy():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
            fit = mixture.GaussianMixture(clusters, covariance_type="diag", n_init=starts, random_state=seed).fit(own)
        found.append(-float(fit.score(own)))
    return points.new_tensor(found)
