"""The version of this package, also where it runs from its sources without being installed."""

__version__ = "0.1.0"
