"""The version of this package, in one place and importable without torch."""

__version__ = "0.1.0"
