"""Installs the emulated device in each Python process that has this folder in PYTHONPATH and PETRA_EMULATED_DEVICES set."""

import sys

if "torch" not in sys.modules:
    from tests.emulated.device import Options, install

    if (options := Options.from_environment()) is not None:
        install(options)
