"""The version of this package, in one place and importable without torch."""

__version__ = "0.2.0"
