"""The whole Kimi K3 system, open, in one package. Import the part you need; nothing heavy loads here."""

__version__ = "0.1.0"
