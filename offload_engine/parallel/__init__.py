"""Ranks: how they are laid out over the axes of a mesh, and what they exchange. Stands on `torch.distributed`."""
