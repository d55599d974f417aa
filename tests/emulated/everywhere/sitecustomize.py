"""Gives every Python process the emulated device whose PYTHONPATH has this folder and the root of the checkout.

PETRA_EMULATED has the options in JSON (:class:`tests.emulated.device.Options`). A rank of torchrun gets its own faults.
"""

import json
import os

from tests.emulated import device

device.install(device.Options(**json.loads(os.environ.get("PETRA_EMULATED", "{}"))))
