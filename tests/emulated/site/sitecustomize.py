"""Installs the emulated device when Python starts, with this folder and the repository on PYTHONPATH: for commands and torchrun."""

import json
import os

from tests.emulated import device

device.install(device.Options(**json.loads(os.environ["PETRA_EMULATED"])))
