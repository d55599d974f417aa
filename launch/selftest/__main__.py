"""``petra selftest``."""

from .command import main

main()
