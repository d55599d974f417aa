"""Run ``petra reproduce``."""

from .command import main

main()
