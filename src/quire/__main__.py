"""Entry point of `python -m quire`, which is the same as `quire`."""

from quire.cli import main

main()
