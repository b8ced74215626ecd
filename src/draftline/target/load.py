"""Loading of the target: the frozen Hugging Face causal LM, its tokenizer, and the parts a drafter borrows.

Call from one thread: transformers changes process-wide defaults while it builds a model. A loaded target holds no
state that a forward changes, so several threads may run it at once (each through a TargetCapture of its own).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from draftline.config.schema import TargetConfig
from draftline.errors import UserError
from draftline.products import widen_head
from draftline.records import FrozenEmbedding, FrozenHead
from draftline.target.backend import resolve_attention
from draftline.target.continuation import carries_state
from draftline.target.facts import (
    NONSENSE,
    TargetFacts,
    auto_class_name,
    facts_from_hf,
    first_line,
    generation_eos_ids,
    load_hf_config,
    model_source,
)
from draftline.target.modules import find_layers, find_norm
from draftline.target.quantized import kind_of, plain, quantization_kwargs
from draftline.target.spread import device_parts, require_accelerate, spread

_SAMPLED_ELEMENTS = 8  # of each weight, for the fingerprint


@dataclass(frozen=True, eq=False)
class LoadedTarget:
    """A frozen target on one device. Immutable: safe to share between threads.

    Attributes:
        config: where it came from.
        facts: sizes and conventions, from its configuration.
        model: the Hugging Face causal LM in eval mode, no gradient.
        text_config: configuration of the text model (inside a multimodal one).
        decoder: the inner text model: embeds, runs the layers, applies the final norm; has no head.
        layers_name: attribute of `decoder` that holds the decoder layers.
        norm_name: attribute of `decoder` that holds the final norm, or None.
        device, dtype: of the embedding, and of rows; other layers may be elsewhere, see `place`.
        embedding, head: the target's own, borrowed by the drafter; plain numbers also if the target is quantised.
        stop_token_ids: ids that end an answer, of the configuration, the tokenizer and the chat template.
        fingerprint: hash of facts and sampled weights; the same on every device and in fp32 and bf16.
    """

    config: TargetConfig
    facts: TargetFacts
    model: Any
    text_config: Any
    decoder: Any
    layers_name: str
    norm_name: str | None
    device: torch.device
    dtype: torch.dtype
    embedding: FrozenEmbedding
    head: FrozenHead
    stop_token_ids: frozenset[int]
    fingerprint: str
    spread_over: str = ""

    @property
    def place(self) -> str:
        """The device, or the devices over which the layers are spread (`cuda:0+cuda:1`)."""
        return self.spread_over or str(self.device)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        layers = getattr(self.decoder, self.layers_name)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def final_norm(self) -> nn.Module | None:
        """The norm before the head; None if there is none."""
        return None if self.norm_name is None else getattr(self.decoder, self.norm_name)

    @property
    def attention(self) -> str:
        """The attention backend in use: sdpa, eager or flash_attention_2."""
        return str(getattr(self.text_config, "_attn_implementation", None) or "eager")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.facts.num_layers

    @property
    def hidden_size(self) -> int:
        """H, width of a hidden state."""
        return self.facts.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which may be more than the tokenizer's tokens."""
        return int(self.embedding.weight_VH.shape[0])

    @cached_property
    def carries_state_through_blocks(self) -> bool:
        """False if the model forgets its recurrent state where several tokens follow at once; see `continuation`."""
        return carries_state(self.model, self.vocab_size, self.device)

    @property
    def has_recurrent_layers(self) -> bool:
        """True if a layer carries a state along the sequence."""
        return self.facts.has_recurrent_layers or bool(getattr(self.model, "_is_stateful", False))


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer with its chat template, from a folder, the hub, or a .gguf file.

    Raises:
        UserError: it cannot be read.
    """
    from transformers import AutoTokenizer

    source, where = model_source(config), f"target.model {config.model}"
    mend = "give a model with a tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.kwargs())
    except (OSError, ValueError, ImportError, KeyError) as error:
        source.require_reachable(where)
        raise UserError(f"cannot read the tokenizer: {first_line(error)}", where=where, mend=mend) from error
    if not tokenizer("a")["input_ids"]:  # transformers makes up an empty one where the files are missing
        raise UserError("there is no tokenizer with the model", where=where, mend=mend)
    return tokenizer


def load_target(
    config: TargetConfig, device: str, share_with: LoadedTarget | None = None, *, tokenizer: Any = None
) -> LoadedTarget:
    """Load the target, frozen, onto one device, or over several.

    Args:
        device: `cpu`, `cuda:0`, ..., `cuda:0+cuda:1`.
        share_with: a target already loaded from the same configuration. On the same device its weights are shared;
            for another device of the same dtype they are copied from there instead of being read again.
        tokenizer: saves reading it again for the stop token ids.

    Raises:
        UserError: the model cannot be read, lacks weights, does not fit, or has no usable head or layers.
    """
    parts = device_parts(device)
    wanted = torch.device(parts[0])
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    dtype = resolve_dtype(config, wanted)
    if share_with is not None and share_with.config == config and share_with.dtype == dtype:
        if share_with.place == (device if len(parts) > 1 else str(wanted)):
            return share_with
        if len(parts) == 1 and not share_with.spread_over:
            return _copy_to(share_with, wanted)
    hf_config = load_hf_config(config)
    facts = facts_from_hf(hf_config, generation_eos_ids(config, hf_config))
    model = _freeze(_read_model(config, hf_config, dtype, wanted), wanted if len(parts) == 1 else torch.device("cpu"))
    if len(parts) == 1:
        widen_head(model)
    else:
        require_accelerate()
        decoder, name = find_layers(model, facts)
        model = spread(model, list(getattr(decoder, name)), parts)
    tokenizer = load_tokenizer(config) if tokenizer is None else tokenizer
    stops = frozenset((*facts.eos_token_ids, *tokenizer_stop_ids(tokenizer)))
    found = wrap_model(model, config=config, facts=facts, stop_token_ids=stops)
    return dataclasses.replace(found, spread_over=device) if len(parts) > 1 else found


def wrap_model(
    model: Any,
    *,
    config: TargetConfig,
    facts: TargetFacts,
    stop_token_ids: frozenset[int] = frozenset(),
    known_fingerprint: str | None = None,
) -> LoadedTarget:
    """Describe a frozen causal LM that is already in memory as a LoadedTarget.

    Raises:
        UserError: no decoder layers or no linear head can be found in it.
    """
    decoder, layers_name = find_layers(model, facts)
    embedding = model.get_input_embeddings()
    weight_VH = plain(embedding.weight)
    return LoadedTarget(
        config=config,
        facts=facts,
        model=model,
        text_config=model.config.get_text_config(decoder=True),
        decoder=decoder,
        layers_name=layers_name,
        norm_name=find_norm(decoder),
        device=weight_VH.device,
        dtype=weight_VH.dtype,
        embedding=FrozenEmbedding(weight_VH, _embedding_scale(embedding, facts)),
        head=_frozen_head(model, facts),
        stop_token_ids=stop_token_ids,
        fingerprint=known_fingerprint or fingerprint(model, facts),
    )


def resolve_dtype(config: TargetConfig, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on an accelerator and float32 on the CPU."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def tokenizer_stop_ids(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end token, and the special token that its chat template puts behind an assistant's answer."""
    stops = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if getattr(tokenizer, "chat_template", None):
        stops |= _turn_end_ids(tokenizer)
    return frozenset(stops)


def fingerprint(model: Any, facts: TargetFacts) -> str:
    """Hash of the facts and of a few elements of every weight, as hex.

    Elements are compared in bfloat16, so that the device and the choice between fp32 and bf16 do not change it.
    """
    described: list[Any] = [dataclasses.asdict(facts)]
    sampled: list[torch.Tensor] = []
    for name, weight in sorted(model.named_parameters()):
        described.append([name, list(weight.shape), *kind_of(weight)])
        if type(weight.data) is torch.Tensor and weight.is_floating_point() and weight.numel():
            step = max(1, weight.numel() // _SAMPLED_ELEMENTS)
            sampled.append(weight.detach().reshape(-1)[::step][:_SAMPLED_ELEMENTS].to(torch.bfloat16))
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    if sampled:
        digest.update(torch.cat(sampled).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def _read_model(config: TargetConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers
    from safetensors import SafetensorError

    source = model_source(config)
    auto_class = getattr(transformers, auto_class_name(hf_config) or "AutoModelForCausalLM")
    where = f"target.model {config.model}"
    try:
        with _quiet_report():
            model, info = auto_class.from_pretrained(
                source.name,
                config=hf_config,
                dtype=dtype,
                attn_implementation=resolve_attention(config, device, dtype, hf_config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **quantization_kwargs(config),
                use_safetensors=True if source.gguf_file is None else None,  # never a pickled file
                **source.kwargs(),
            )
    except (OSError, ImportError, SafetensorError, *NONSENSE) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(f"cannot load the model: {first_line(error)}", where=where, mend="check the files") from error
    missing = sorted((*info["missing_keys"], *(key[0] for key in info.get("mismatched_keys", ()))))
    if missing:
        raise UserError(
            f"{len(missing)} weights are missing or of another shape, first {missing[0]}",
            where=where,
            mend="they would be random: give the complete model",
        )
    return model


@contextmanager
def _quiet_report() -> Iterator[None]:
    """What transformers would print about missing weights is told in one line of ours."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _freeze(model: Any, device: torch.device) -> Any:
    model.eval().requires_grad_(False)
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        raise UserError(
            f"the target's weights need {needed / 2**30:.1f} GiB, more than is free on {device}",
            mend="use a smaller dtype, another device, or fewer workers on it",
        ) from error


def _copy_to(source: LoadedTarget, device: torch.device) -> LoadedTarget:
    """The same target on another device; the deep copy finds every weight already moved in its memo."""
    tensors = [*source.model.parameters(), *source.model.buffers()]
    moved = {id(t): t.detach().to(device) for t in tensors}
    memo: dict[int, Any] = {
        id(t): nn.Parameter(moved[id(t)], requires_grad=False) if isinstance(t, nn.Parameter) else moved[id(t)]
        for t in tensors
    }
    return wrap_model(
        copy.deepcopy(source.model, memo),
        config=source.config,
        facts=source.facts,
        stop_token_ids=source.stop_token_ids,
        known_fingerprint=source.fingerprint,
    )


def _embedding_scale(embedding: nn.Module, facts: TargetFacts) -> float:
    """Gemma keeps its factor beside the weights and rounds it to their dtype (55.43 becomes 55.5 in bf16)."""
    own = getattr(embedding, "embed_scale", None)
    if isinstance(own, torch.Tensor):
        return float(own.to(embedding.weight.dtype))  # type: ignore[arg-type]
    return float(own) if own is not None else facts.embedding_scale


def _frozen_head(model: Any, facts: TargetFacts) -> FrozenHead:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise UserError(
            f"{type(model).__name__} has no linear output head", mend="this architecture is not supported as a target"
        )
    bias = getattr(head, "bias", None)
    return FrozenHead(
        weight_VH=plain(weight),
        bias_V=None if bias is None else bias.detach(),
        multiplier=facts.logit_multiplier,
        softcap=facts.final_logit_softcapping,
    )


def _turn_end_ids(tokenizer: Any) -> set[int]:
    """The first token behind the answer in a rendered conversation, if it is a special one."""
    from jinja2 import TemplateError

    marker = "draftline"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ValueError, TypeError, KeyError):  # a template may refuse this plain conversation
        return set()
    behind = text.rpartition(marker)[2]
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
    special = {*tokenizer.all_special_ids, *_special_added_ids(tokenizer)}
    return {ids[0]} if ids and ids[0] in special else set()


def _special_added_ids(tokenizer: Any) -> set[int]:
    return {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
