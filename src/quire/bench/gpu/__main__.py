"""`python -m quire.bench.gpu`: needs nothing installed but torch, numpy, triton and what reads checkpoints."""

import sys

from quire.bench.gpu.run import main

sys.exit(main())
