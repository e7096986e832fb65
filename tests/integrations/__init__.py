"""Loops of other libraries over the engine."""
