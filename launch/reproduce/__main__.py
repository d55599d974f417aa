"""Run ``python -m launch.reproduce``."""

from .command import main

main()
