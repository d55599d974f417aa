"""``python -m launch.doctor``."""

from .command import main

main()
