"""The outputs of `LLM` and `AsyncLLM`, at vLLM's path."""

from quire.frontend.embedding import ClassificationOutput as ClassificationOutput
from quire.frontend.embedding import ClassificationRequestOutput as ClassificationRequestOutput
from quire.frontend.embedding import EmbeddingOutput as EmbeddingOutput
from quire.frontend.embedding import EmbeddingRequestOutput as EmbeddingRequestOutput
from quire.frontend.embedding import PoolingOutput as PoolingOutput
from quire.frontend.embedding import PoolingRequestOutput as PoolingRequestOutput
from quire.frontend.embedding import ScoringOutput as ScoringOutput
from quire.frontend.embedding import ScoringRequestOutput as ScoringRequestOutput
from quire.frontend.outputs import BeamSearchOutput as BeamSearchOutput
from quire.frontend.outputs import BeamSearchSequence as BeamSearchSequence
from quire.frontend.outputs import CompletionOutput as CompletionOutput
from quire.frontend.outputs import Logprob as Logprob
from quire.frontend.outputs import RequestMetrics as RequestMetrics
from quire.frontend.outputs import RequestOutput as RequestOutput
