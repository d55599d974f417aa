"""Commands. In a checkout, this package is ``launch``; a wheel contains it as ``petra.launch``."""


def own_module(name: str) -> str:
    """Return the name under which this package is installed for one of its modules, given as ``launch.train``."""
    return __name__ + name.removeprefix("launch") if name.startswith("launch.") else name
