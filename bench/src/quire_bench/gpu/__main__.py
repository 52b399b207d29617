"""`python -m quire_bench.gpu`: needs nothing installed but torch, numpy, triton and what reads checkpoints."""

import sys

from quire_bench.gpu.run import main

sys.exit(main())
