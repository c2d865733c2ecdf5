"""scikit-learn estimators over sets: `SetClassifier`, `SetRegressor`, `SetFeaturizer`; `SetEstimator` has their options."""

from setstream._utils.optional import need

need("sklearn", "sklearn", "these estimators")

from setstream.integrations.sklearn.base import SetEstimator  # noqa: E402 - only after the extra is known to be there
from setstream.integrations.sklearn.estimators import SetClassifier, SetFeaturizer, SetRegressor  # noqa: E402
from setstream.integrations.sklearn.explain import Explanation, permutation_importance  # noqa: E402
from setstream.integrations.sklearn.frame import ElementWise, FrameToSets  # noqa: E402

__all__ = ["ElementWise", "Explanation", "FrameToSets", "SetClassifier", "SetEstimator", "SetFeaturizer", "SetRegressor"]
__all__ += ["permutation_importance"]
