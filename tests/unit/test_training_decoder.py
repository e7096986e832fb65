"""The decoder: shapes, causality, and that neither checkpointing nor the length of the table changes a bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from offload_engine.training.config import DecoderConfig
from offload_engine.training.models import Decoder

SMALL = {"dim": 24, "layers": 3, "heads": 3, "kv_heads": 1, "ffn": 40, "vocab": 61, "seq": 17}


def decoder(**changes: object) -> Decoder:
    torch.manual_seed(3)
    return Decoder(DecoderConfig(**{**SMALL, **changes}))  # type: ignore[arg-type]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(61, (2, 15), generator=torch.Generator().manual_seed(5))


def test_logits_have_the_shape_and_dtype_of_the_model(tokens: torch.Tensor) -> None:
    assert decoder()(tokens).shape == (2, 15, 61)
    assert decoder().bfloat16()(tokens).dtype == torch.bfloat16


def test_fresh_weights_predict_about_uniformly(tokens: torch.Tensor) -> None:
    loss = F.cross_entropy(decoder()(tokens).flatten(0, 1), tokens.flatten())
    assert abs(loss.item() - torch.log(torch.tensor(61.0)).item()) < 0.2


@torch.no_grad()
def test_no_position_sees_a_later_one(tokens: torch.Tensor) -> None:
    model = decoder()
    changed = tokens.clone()
    changed[:, 9:] = 0
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(tokens)[:, 9:], model(changed)[:, 9:])


@pytest.mark.parametrize("kind", ["block", "block_reentrant"])
def test_checkpointing_changes_no_bit(tokens: torch.Tensor, kind: str) -> None:
    plain, checkpointed = decoder(), decoder(activation_checkpointing=kind)
    for model in (plain, checkpointed):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        assert torch.equal(a.grad, b.grad), name


def test_tied_embeddings_are_one_parameter(tokens: torch.Tensor) -> None:
    model = decoder(tie_embeddings=True)
    assert model.head.weight is model.embedding.weight
    assert len(list(decoder().parameters())) == len(list(model.parameters())) + 1
    model(tokens).sum().backward()
    assert model.embedding.weight.grad is not None


def test_position_tables_follow_from_the_config_and_are_not_saved() -> None:
    assert set(decoder().state_dict()) == {name for name, _ in decoder().named_parameters()}
