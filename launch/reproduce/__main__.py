"""Run ``python -m launch.reproduce``."""

from launch.reproduce.command import main

main()
