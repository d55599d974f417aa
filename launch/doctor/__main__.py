"""``python -m launch.doctor``."""

from launch.doctor.command import main

main()
