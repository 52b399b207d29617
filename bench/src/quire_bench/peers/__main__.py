"""`python -m quire_bench.peers`: Quire beside other engines."""

import signal
import sys

from quire_bench.peers.run import main

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no stopped process is left
sys.exit(main())
