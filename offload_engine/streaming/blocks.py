"""The blocks of a model: the sequence of like modules that holds most of its parameters, if it has one.

Read by what works on a model layer by layer: offloaded activations, and micro-batches that share each layer's fetch.

Note: the rule.
    A candidate is an `nn.ModuleList` or `nn.Sequential`, anywhere in the model, of at least two different modules of
    one class, each with parameters. It counts only where it holds most of the parameters outside the vocabulary: at
    least half of those that are in no `nn.Embedding` and in no layer of an embedding's shape (a head, tied or not). Of
    several, the one with the most parameters is taken, then the longest, then the outermost. A model of an encoder and
    a decoder (T5) has two: the larger is taken, which is the decoder, and the other is as what comes before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["find_blocks"]


def _sizes(modules: Iterable[nn.Module]) -> dict[int, int]:
    """Return the elements of each parameter of the modules, by its id: once each, however often it is used."""
    return {id(param): param.numel() for module in modules for param in module.parameters()}


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the model's blocks in the order of their list; empty when it has no such sequence.

    See the note "the rule" in this file. Whether the model really runs them in that order is for the caller to see.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.Linear)]
    # Not `module.weight`: asked of a parametrized module, it runs the parametrization, which may change its buffers.
    weights = [(module, module._parameters.get("weight")) for module in tables]
    shapes = {w.shape for module, w in weights if isinstance(module, nn.Embedding) and w is not None}
    vocabulary = {id(w) for _, w in weights if w is not None and w.shape in shapes}
    least = sum(numel for key, numel in _sizes([model]).items() if key not in vocabulary) / 2
    best: tuple[int, int] = (0, 0)
    blocks: list[tuple[str, nn.Module]] = []
    for name, holder in model.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.Sequential):
            continue
        children = list(holder.named_children())  # a module that is there twice is named once
        sizes = [_sizes([child]) for _, child in children]
        if len(children) < 2 or len(children) < len(holder) or not all(sizes):
            continue
        if any(type(child) is not type(children[0][1]) for _, child in children):
            continue
        held = {key: numel for size in sizes for key, numel in size.items() if key not in vocabulary}
        numel = sum(held.values())
        if numel >= least and (numel, len(children)) > best:
            best = numel, len(children)
            prefix = f"{name}." if name else ""
            blocks = [(prefix + key, child) for key, child in children]
    return blocks
