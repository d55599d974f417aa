"""``python -m launch.selftest``."""

from .command import main

main()
