"""The main job: text, models, the loop, and plain PyTorch as the reference of every comparison."""
