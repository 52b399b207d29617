"""The former place of names that are in quire.frontend.outputs. It will be removed in 0.2."""

import warnings

from quire.frontend.outputs import BeamSearchOutput as BeamSearchOutput
from quire.frontend.outputs import BeamSearchSequence as BeamSearchSequence
from quire.frontend.outputs import CompletionOutput as CompletionOutput
from quire.frontend.outputs import Logprob as Logprob
from quire.frontend.outputs import RequestOutput as RequestOutput

warnings.warn("quire.text is now quire.frontend.outputs; it will be removed in 0.2", DeprecationWarning, stacklevel=2)
