"""The former place of names that are in quire.frontend.loglikelihood. It will be removed in 0.2."""

import warnings

from quire.frontend.loglikelihood import LoglikelihoodOutput as LoglikelihoodOutput

warnings.warn(
    "quire.loglikelihood is now quire.frontend.loglikelihood; it will be removed in 0.2",
    DeprecationWarning,
    stacklevel=2,
)
