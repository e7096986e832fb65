"""Whole training runs compared with the same model in plain PyTorch, run in a loop of its own."""
