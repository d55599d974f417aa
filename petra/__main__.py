"""Start the command line: ``petra train ...`` or ``python -m petra train ...``."""

from importlib import import_module
from pathlib import Path


def main() -> None:
    """Run the commands: those of ``petra.launch`` in a wheel, those of ``launch`` beside ``petra`` in a checkout."""
    package = "petra.launch" if Path(__file__).with_name("launch").is_dir() else "launch"
    import_module(f"{package}.cli").main()


if __name__ == "__main__":
    main()
