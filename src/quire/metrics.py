"""The metrics that `LLM.get_metrics` returns."""

from quire.frontend.metric_values import Counter as Counter
from quire.frontend.metric_values import Gauge as Gauge
from quire.frontend.metric_values import Histogram as Histogram
from quire.frontend.metric_values import Metric as Metric
from quire.frontend.metric_values import Vector as Vector
