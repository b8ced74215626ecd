"""Capture of a target's hidden states for one planned row.

Taps are read by forward hooks and written straight into the row's buffer; no list of all layers is kept. Hooks sit
on a private *view* of the decoder: shallow copies of the modules that are changed (the tapped layers, the list of
layers, the final norm), which share every weight with the model. So the shared model is never altered, a forward
that needs no final state runs only up to the last tap, and several captures may run at once on one model.

Samples of a row never see each other. Four layouts, the first that the model allows:

    varlen   one forward of the whole row, attention by the samples' bounds (target/varlen.py); CUDA, 16 bit
    packed   one forward of the whole row under a block-diagonal causal mask, positions restarting in each sample: an
             explicit mask for full attention; with sliding layers transformers builds one for each kind of layer from
             the restarting positions; flash_attention_2 gets the bounds
    padded   right-padded sub-batches of similar length; what is causal, also a recurrent state, never sees the padding
    single   one forward a sample, for rotary embeddings that depend on the length of the whole batch
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from draftline.errors import RunFailedError, UserError
from draftline.records import HiddenStateRow, PlannedRow
from draftline.target.conventions import check_taps
from draftline.target.facts import LENGTH_DEPENDENT_ROPE
from draftline.target.fused_norms import with_fused_norms
from draftline.target.load import LoadedTarget
from draftline.target.varlen import MAX_HEAD_DIM, with_backend

CaptureLayout = Literal["varlen", "packed", "padded", "single"]

_PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
_PACKABLE_BACKENDS = frozenset({"sdpa", "eager", "flash_attention_2"})
# A sample joins a sub-batch if it is at least this share of its longest one: bounds the padding.
_MIN_FILL = 0.75


class SampleLike(Protocol):
    """What is needed of a sample: int ids [T] and a bool mask [T], as numpy arrays."""

    @property
    def sample_id(self) -> str:
        """Its name, unique in the data set."""

    @property
    def input_ids(self) -> Any:
        """Token ids [T]."""

    @property
    def loss_mask(self) -> Any:
        """True where the target wrote the token, [T]."""


@dataclass
class _Sink:
    """Where one forward's states go: `rows` of the flattened [B * S, H] states to `places` of the row."""

    taps_TF: torch.Tensor
    rows: torch.Tensor | None = None
    places: torch.Tensor | None = None
    seen: set[int] = field(default_factory=set)

    def take(self, index: int, hidden_BSH: torch.Tensor) -> None:
        width = hidden_BSH.shape[-1]
        self.write(self.taps_TF[:, index * width : (index + 1) * width], hidden_BSH)
        self.seen.add(index)

    def write(self, out_TH: torch.Tensor, hidden_BSH: torch.Tensor) -> None:
        flat = hidden_BSH.reshape(-1, hidden_BSH.shape[-1]).to(out_TH.device)  # a layer of a spread target is elsewhere
        if self.rows is None or self.places is None:
            out_TH.copy_(flat)
        else:
            out_TH.index_copy_(0, self.places, flat.index_select(0, self.rows))


@dataclass(frozen=True, slots=True)
class _RowIndex:
    """Token ids, positions (restarting in each sample) and sample numbers of a row."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    documents_T: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[SampleLike], device: torch.device) -> _RowIndex:
        lengths = [len(s.input_ids) for s in samples]
        return cls(
            _to_device(np.concatenate([s.input_ids for s in samples]).astype(np.int64), device),
            _to_device(np.concatenate([np.arange(n) for n in lengths]), device),
            _to_device(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), device),
        )


class TargetCapture:
    """Runs a frozen target over planned rows. One per worker thread; many may share one LoadedTarget.

    Args:
        target: the loaded target.
        taps: 0-based ids of the decoder layers whose output is kept.
        want_final: also keep the last hidden state, AFTER the final norm (what the head reads). Without it nothing
            behind the last tap runs.
        layout: how samples are kept apart: what the self-test settled on (`SelfTestReport.layout`). None: padded or
            single, which need no proof of the mask.
        fused_norms: RMS norms in one kernel each; states then differ from the model's own by roundings. None: as
            `target.fused_norms` of the target's configuration says.

    Raises:
        UserError: taps outside the target or on its last layer.
    """

    def __init__(
        self,
        target: LoadedTarget,
        taps: tuple[int, ...],
        *,
        want_final: bool,
        layout: CaptureLayout | None = None,
        fused_norms: bool | None = None,
    ) -> None:
        self.target, self.want_final = target, want_final
        self.taps = check_taps(taps, target.num_layers)
        self.layout: CaptureLayout = layout or _unproven_layout(target)
        self._local = threading.local()
        fused = target.config.fused_norms if fused_norms is None else fused_norms
        decoder = with_fused_norms(target.decoder) if fused else target.decoder
        decoder = with_backend(decoder) if self.layout == "varlen" else decoder
        self._decoder = _decoder_view(target, decoder, self.taps, self._on_tap, whole=want_final)

    def capture(self, planned: PlannedRow, samples: Sequence[SampleLike]) -> HiddenStateRow:
        """Hidden states of a row, its samples packed end to end in the given order, on the target's device.

        Raises:
            UserError: a token id outside the target's vocabulary.
            RunFailedError: the samples do not add up to the planned row, or a tapped layer did not run.
        """
        lengths = tuple(len(s.input_ids) for s in samples)
        self._check(planned, samples, lengths)
        index = _RowIndex.of(samples, self.target.device)
        with torch.no_grad():
            taps_TF, final_TH = self._run(index.ids_T, index.positions_T, index.documents_T, lengths)
        return assemble_row(planned, samples, taps_TF, final_TH, taps=self.taps, index=index)

    def assemble(
        self,
        planned: PlannedRow,
        samples: Sequence[SampleLike],
        taps_TF: torch.Tensor,
        final_TH: torch.Tensor | None,
    ) -> HiddenStateRow:
        """A row from states captured earlier, laid out like those of `capture` and on the target's device."""
        return assemble_row(planned, samples, taps_TF, final_TH, taps=self.taps)

    def _check(self, planned: PlannedRow, samples: Sequence[SampleLike], lengths: tuple[int, ...]) -> None:
        if sum(lengths) != planned.n_tokens or 0 in lengths or not lengths:
            raise RunFailedError(
                f"row {planned.row_id} is planned with {planned.n_tokens} tokens but its samples have {list(lengths)}",
                origin="target capture",
            )
        for sample in samples:
            top = int(np.max(sample.input_ids))
            if top >= self.target.vocab_size or int(np.min(sample.input_ids)) < 0:
                raise UserError(
                    f"token id {top} is outside the target's vocabulary of {self.target.vocab_size}",
                    where=f"sample {sample.sample_id}",
                    mend="prepare the data with this target's tokenizer",
                )

    def _run(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, documents_T: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, width = len(ids_T), self.target.hidden_size
        taps_TF = ids_T.new_empty((tokens, len(self.taps) * width), dtype=self.target.dtype)
        final_TH = ids_T.new_empty((tokens, width), dtype=self.target.dtype) if self.want_final else None
        if self.layout in ("varlen", "packed"):
            kwargs: dict[str, Any] = {"position_ids": positions_T[None]}
            if self.layout == "varlen" or self.target.attention == "flash_attention_2":
                kwargs |= _bounds(lengths, ids_T.device)
            elif set(self.target.facts.layer_types) == {"full_attention"}:
                kwargs["attention_mask"] = block_diagonal_mask(documents_T, self.target.attention, self.target.dtype)
            self._forward(ids_T[None], _Sink(taps_TF), final_TH, **kwargs)
            return taps_TF, final_TH
        min_fill = 2.0 if self.layout == "single" else _MIN_FILL
        starts = np.concatenate([[0], np.cumsum(lengths)])
        for group in sub_batches(lengths, min_fill):
            gather_BS, rows, places = _padded_indices(group, lengths, starts)
            sink = _Sink(taps_TF, _to_device(rows, ids_T.device), _to_device(places, ids_T.device))
            self._forward(ids_T[_to_device(gather_BS, ids_T.device)], sink, final_TH)
        return taps_TF, final_TH

    def _forward(self, ids_BS: torch.Tensor, sink: _Sink, final_TH: torch.Tensor | None, **kwargs: Any) -> None:
        self._local.sink = sink
        try:
            output = self._decoder(input_ids=ids_BS, use_cache=False, **kwargs)
        finally:
            self._local.sink = None
        missing = [self.taps[i] for i in range(len(self.taps)) if i not in sink.seen]
        if missing:
            raise RunFailedError(f"tapped layers {missing} did not run", origin="target capture")
        if final_TH is not None:
            sink.write(final_TH, output.last_hidden_state)

    def _on_tap(self, index: int, hidden_BSH: torch.Tensor) -> None:
        sink: _Sink | None = getattr(self._local, "sink", None)
        if sink is not None:
            sink.take(index, hidden_BSH)


def assemble_row(
    planned: PlannedRow,
    samples: Sequence[SampleLike],
    taps_TF: torch.Tensor,
    final_TH: torch.Tensor | None,
    *,
    taps: tuple[int, ...],
    index: _RowIndex | None = None,
) -> HiddenStateRow:
    """A row out of states of its samples end to end, wherever they come from, on the device that they are on.

    Args:
        final_TH: after the final norm.
        index: of the same samples, if it was made already.
    """
    device = taps_TF.device
    index = index or _RowIndex.of(samples, device)
    return HiddenStateRow(
        row_id=planned.row_id,
        epoch=planned.epoch,
        sample_ids=tuple(s.sample_id for s in samples),
        lengths=tuple(len(s.input_ids) for s in samples),
        input_ids_T=index.ids_T,
        loss_mask_T=_to_device(np.concatenate([s.loss_mask for s in samples]).astype(np.bool_), device),
        document_ids_T=index.documents_T,
        position_ids_T=index.positions_T,
        taps_TF=taps_TF,
        final_hidden_TH=final_TH,
        final_hidden_norm="post",
        tap_layer_ids=taps,
        ready=_ready_event(device),
    )


def natural_layout(target: LoadedTarget) -> CaptureLayout:
    """The best layout that the target's architecture allows; the self-test proves it or falls back.

    On a CPU padded is also the cheaper one: a dense T x T mask costs 1.2 times its seconds at 1024 tokens a row and
    1.5 times at 2048 (SmolLM2-135M, samples of 100 tokens, one core), and as much at 512.
    """
    packable = not target.has_recurrent_layers and set(target.facts.layer_types) <= _PACKABLE_LAYERS
    packable = packable and not target.facts.rope_types & LENGTH_DEPENDENT_ROPE
    if not packable or target.attention not in _PACKABLE_BACKENDS or target.device.type == "cpu":
        return _unproven_layout(target)
    half = target.dtype in (torch.bfloat16, torch.float16)
    # The twin that reads bounds would run past the hooks that move states between devices.
    on_one_gpu = target.device.type == "cuda" and not target.spread_over
    by_bounds = on_one_gpu and half and target.facts.head_dim <= MAX_HEAD_DIM
    return "varlen" if by_bounds and target.attention == "sdpa" else "packed"


def fallback_layouts(layout: CaptureLayout) -> tuple[CaptureLayout, ...]:
    """The layout itself, then what to try instead if it does not prove itself."""
    chain: tuple[CaptureLayout, ...] = ("varlen", "packed", "padded")
    return chain[chain.index(layout) :] if layout in chain else (layout,)


def _unproven_layout(target: LoadedTarget) -> CaptureLayout:
    return "single" if target.facts.rope_types & LENGTH_DEPENDENT_ROPE else "padded"


def _bounds(lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """The samples' bounds, under the names by which transformers hands them to its attention."""
    bounds = _to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)
    longest = max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def block_diagonal_mask(documents_T: torch.Tensor, attention: str, dtype: torch.dtype) -> torch.Tensor:
    """Causal mask [1, 1, T, T] inside each document: bool for sdpa, additive for eager, which would add True as 1."""
    order_T = torch.arange(len(documents_T), device=documents_T.device)
    visible_TT = (documents_T[:, None] == documents_T[None, :]) & (order_T[:, None] >= order_T[None, :])
    if attention == "eager":
        lowest = torch.finfo(dtype).min
        return torch.zeros_like(visible_TT, dtype=dtype).masked_fill(~visible_TT, lowest)[None, None]
    return visible_TT[None, None]


def sub_batches(lengths: Sequence[int], min_fill: float) -> list[list[int]]:
    """Group sample indices, longest first; in a group the shortest is at least `min_fill` of the longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[index] >= min_fill * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _padded_indices(
    group: Sequence[int], lengths: Sequence[int], starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gather indices [B, S] of a right-padded batch (padding repeats token 0), and where its real tokens come from
    (in the flattened batch) and go to (in the row)."""
    longest = max(lengths[i] for i in group)
    gather = np.zeros((len(group), longest), dtype=np.int64)
    rows, places = [], []
    for b, i in enumerate(group):
        own = np.arange(lengths[i], dtype=np.int64)
        gather[b, : lengths[i]] = starts[i] + own
        rows.append(b * longest + own)
        places.append(starts[i] + own)
    return gather, np.concatenate(rows), np.concatenate(places)


def _decoder_view(target: LoadedTarget, decoder: Any, taps: tuple[int, ...], on_tap: Any, *, whole: bool) -> Any:
    """A copy of `decoder` (the target's, or a twin of it) with hooks on the tapped layers.

    Ends behind the last tap unless `whole`. Shares all weights. Children without weights (rotary embeddings, which may
    cache by length) are copied.
    """
    layers = list(getattr(decoder, target.layers_name))
    for index, tap in enumerate(taps):
        layers[tap] = _tapped(layers[tap], index, on_tap)
    view = copy.copy(decoder)
    view._modules = dict(decoder._modules)
    for name, child in decoder.named_children():
        if not any(True for _ in child.parameters()):
            view._modules[name] = copy.deepcopy(child)
    view._modules[target.layers_name] = nn.ModuleList(layers if whole else layers[: taps[-1] + 1])
    if not whole and target.norm_name is not None:
        view._modules[target.norm_name] = nn.Identity()
    return view


def _tapped(layer: nn.Module, index: int, on_tap: Any) -> nn.Module:
    """A shallow copy of a layer whose output is handed to `on_tap(index, hidden_BSH)`."""
    tapped = copy.copy(layer)
    tapped._forward_hooks = copy.copy(layer._forward_hooks)

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        on_tap(index, output[0] if isinstance(output, tuple) else output)

    tapped.register_forward_hook(hook)
    return tapped


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copied through pinned memory on CUDA: from pageable memory the host would wait for the stream."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _ready_event(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
