"""The former place of names that are in quire.frontend.embedding. It will be removed in 0.2."""

import warnings

from quire.frontend.embedding import EmbeddingOutput as EmbeddingOutput
from quire.frontend.embedding import EmbeddingRequestOutput as EmbeddingRequestOutput
from quire.frontend.embedding import ScoringOutput as ScoringOutput
from quire.frontend.embedding import ScoringRequestOutput as ScoringRequestOutput

warnings.warn(
    "quire.embedding is now quire.frontend.embedding; it will be removed in 0.2", DeprecationWarning, stacklevel=2
)
