"""Run ``petra doctor`` under torchrun."""

from .command import main

main()
