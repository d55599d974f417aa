"""Commands. In a checkout, this package is ``launch``; a wheel contains it as ``petra.launch``."""
