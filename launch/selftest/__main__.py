"""Run the self-test in the processes that torchrun has started."""

from .command import main

main()
