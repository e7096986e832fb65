"""Checkpoints: the file format here; saving and loading of an engine's state stand on it."""
