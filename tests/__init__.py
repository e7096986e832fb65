"""The tests: `unit` mirrors the rooms of the package, `parity` compares whole runs with plain PyTorch."""
