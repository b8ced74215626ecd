"""Trainers of others behind the shape that the benchmarks time: `warm`, `run_step`, `run_train`, `optimizer`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

LEARNING_RATE = 1e-4
CHUNK_POSITIONS = 2048
WARM_UP_STEPS = 2


def has_specforge() -> bool:
    return find_spec("specforge") is not None


class SpecForgeSide:
    """SpecForge's OnlineDFlashModel with its own AdamW on fp32 masters, on the inputs of `step.Inputs`."""

    name = "specforge"

    def __init__(self, inputs: Any, *, with_optimizer: bool = False) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
        from specforge.optimizer import BF16Optimizer

        shape, device = inputs.shape, inputs.device
        self._inputs = inputs
        with torch.device(device):
            draft = DFlashDraftModel(_config(shape, device)).to(dtype=inputs.dtype)
        draft.train()
        self._parameters = [p for p in draft.parameters() if p.requires_grad]
        self.model = OnlineDFlashModel(
            draft,
            _frozen_head(inputs.head_VH),
            torch.nn.Embedding.from_pretrained(inputs.embedding_VH),
            mask_token_id=shape.vocab - 1,
            block_size=shape.block_size,
            attention_backend=_attention(device),
            num_anchors=shape.anchors,
            loss_decay_gamma=7.0,
            objective_chunk_blocks=max(1, CHUNK_POSITIONS // shape.block_size),
        )
        self._batch = {
            "input_ids": inputs.row.input_ids_T[None],
            "hidden_states": inputs.row.taps_TF[None],
            "loss_mask": inputs.row.loss_mask_T[None].float(),
        }
        self.optimizer = None
        if with_optimizer:
            self.optimizer = BF16Optimizer(draft, lr=LEARNING_RATE, max_grad_norm=1.0, total_steps=10_000)

    def warm(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self.run_train() if self.optimizer else self.run_step()

    def run_step(self) -> None:
        """Forward, backward, clipping."""
        for parameter in self._parameters:
            parameter.grad = None
        self._backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)

    def run_train(self) -> None:
        """Forward, backward, its optimizer (which clips and clears)."""
        assert self.optimizer is not None
        self._backward()
        self.optimizer.step()

    def _backward(self) -> None:
        loss, _, _ = self.model(**self._batch)
        loss.backward()


def _attention(device: torch.device) -> str:
    return "flex_attention" if device.type == "cuda" else "sdpa"


def _frozen_head(weight_VH: torch.Tensor) -> torch.nn.Linear:
    head = torch.nn.Linear(weight_VH.shape[1], weight_VH.shape[0], bias=False, device="meta")
    head.weight = torch.nn.Parameter(weight_VH, requires_grad=False)
    return head


def _config(shape: Any, device: torch.device) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        attention_bias=False,
        layer_types=["full_attention"] * shape.layers,
    )
    config.block_size = shape.block_size
    config.num_target_layers = shape.spec().num_target_layers
    config.dflash_config = {"target_layer_ids": list(shape.spec().taps), "mask_token_id": shape.vocab - 1}
    config._attn_implementation = _attention(device)
    return config
