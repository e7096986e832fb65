"""What of PyTorch and its ecosystem works under the engine: see `__main__`."""
