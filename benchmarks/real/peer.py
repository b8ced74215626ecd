"""SpecForge's OnlineDFlashModel and its own optimizer in a plain loop over the same captured states."""

from __future__ import annotations

from typing import Any

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.records import FrozenEmbedding, FrozenHead
from draftline.target.load import LoadedTarget
from peers import has_specforge
from settings import Settings
from states import PaddedSamples
from store import UnavailableError
from training import Weights, compute_dtype

GAMMA = 7.0


class PeerTrainer:
    """SpecForge's side: its model, loss, anchors, masks, padding and optimizer, at our sizes and first weights.

    Its batches are padded samples, as its own loader makes them. The learning rate is set from outside, so that its
    course over the seconds is the same as ours.

    Args:
        spec: architecture, of the plain recipe.
        first: fp32 weights to start from.

    Raises:
        UnavailableError: it is not installed, or cannot be imported.
    """

    def __init__(
        self, target: LoadedTarget, samples: PaddedSamples, spec: DrafterSpec, first: Weights, settings: Settings
    ) -> None:
        if not has_specforge():
            raise UnavailableError("specforge is not installed (pip install --no-deps specforge==0.2.0)")
        try:
            from specforge.optimizer import BF16Optimizer
        except ImportError as error:
            raise UnavailableError(f"specforge cannot be imported here: {error}") from error
        self.spec, self._samples, self._device = spec, samples, target.device
        self._batch_size = settings.peer_samples
        embedding = FrozenEmbedding(target.embedding.weight_VH.to(compute_dtype(target.device)))
        self.model = _online_model(spec, embedding, FrozenHead(embedding.weight_VH), settings, target.device)
        draft = self.model.draft_model
        draft.load_state_dict({name: value.to(target.device) for name, value in first.items()})
        draft.train()
        self._names = [name for name, _ in draft.named_parameters()]
        self._optimizer = BF16Optimizer(draft, lr=1e-3, max_grad_norm=1.0, total_steps=1_000_000)
        with torch.no_grad():  # the masters were copied from the compute dtype
            for name, master in zip(self._names, self._optimizer.fp32_params, strict=True):
                master.copy_(first[name])
        self._generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)  # it draws its anchors from the global generator
        self._order: list[int] = []

    def warm(self) -> None:
        """Forward and backward of two batches; the gradients are thrown away."""
        for _ in range(2):
            self._backward()
            self.model.draft_model.zero_grad(set_to_none=True)
        self._order = []

    def step(self, rate: float) -> None:
        """The next batch."""
        self._backward()
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()

    def weights(self) -> Weights:
        """Copies of its fp32 masters; its parameter names are z-lab's, as ours are."""
        pairs = zip(self._names, self._optimizer.fp32_params, strict=True)
        return {name: master.detach().clone() for name, master in pairs}

    def _backward(self) -> None:
        loss, _, _ = self.model(**self._samples.batch(self._next_samples()))
        loss.backward()

    def _next_samples(self) -> torch.Tensor:
        """Samples of the next batch: each epoch in a new order; the last few of an epoch are left out."""
        if len(self._order) < self._batch_size:
            self._order = torch.randperm(len(self._samples), generator=self._generator).tolist()
        chosen, self._order = self._order[: self._batch_size], self._order[self._batch_size :]
        return torch.tensor(chosen, device=self._device)


def _online_model(
    spec: DrafterSpec, embedding: FrozenEmbedding, head: FrozenHead, settings: Settings, device: torch.device
) -> Any:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    with torch.device(device):
        draft = DFlashDraftModel(_config(spec, attention))
    frequencies = draft.rotary_emb.inv_freq.clone()
    draft.to(dtype=compute_dtype(device))
    draft.rotary_emb.inv_freq = frequencies  # its trainer builds it in the compute dtype, which leaves them in fp32
    linear = torch.nn.Linear(spec.hidden_size, spec.vocab_size, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(head.weight_VH, requires_grad=False)
    return OnlineDFlashModel(
        draft,
        linear,
        torch.nn.Embedding.from_pretrained(embedding.weight_VH),
        mask_token_id=spec.mask_token_id,
        block_size=spec.block_size,
        attention_backend=attention,
        num_anchors=settings.peer_anchors,
        loss_decay_gamma=GAMMA,
        objective_chunk_blocks=0,  # all at once, nothing computed again: memory is plenty here
    )


def _config(spec: DrafterSpec, attention: str) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=dict(spec.rope_parameters),
        rms_norm_eps=spec.rms_norm_eps,
        attention_bias=False,
        layer_types=["full_attention"] * spec.num_layers,
    )
    config.block_size = spec.block_size
    config.num_target_layers = spec.num_target_layers
    config.dflash_config = {"target_layer_ids": list(spec.taps), "mask_token_id": spec.mask_token_id}
    config._attn_implementation = attention
    return config
