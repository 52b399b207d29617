"""The parameters of requests, at vLLM's path."""

from quire.engine.beam import BeamSearchParams as BeamSearchParams
from quire.request import RequestOutputKind as RequestOutputKind
from quire.request import SamplingParams as SamplingParams
from quire.request import StructuredOutputsParams as StructuredOutputsParams
