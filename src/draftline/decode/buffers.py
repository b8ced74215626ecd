"""Key/value buffers with explicit places: several texts of different lengths in one forward, and static shapes.

A buffer has one row a text and one column a position. A forward brings, for each of its tokens, the row and column that
its keys and values are written to, and a mask of the columns it may see; so rows may have different lengths, and what a
rejected draft has left behind is unseen until it is overwritten. Tokens that only fill a forward up stand in front of
the real ones and are written to one column behind all others, which no mask ever shows.

Shape letters: R rows of the buffer, B rows of a forward, N its tokens a row, M key/value heads, C columns, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from draftline.decode.steps import Tokens, TreeLayout
from draftline.errors import UserError

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

# One additive mask [B, 1, N, stop] for all layers, or one a kind of layer.
Masks = torch.Tensor | dict[str, torch.Tensor]


@dataclass(slots=True)
class Place:
    """Where the next forward writes, and which columns it reads.

    Attributes:
        rows_B: rows of the buffer; None: all of them, in order.
        columns_BN: column of each token.
        stop: columns [0, stop) are read.
    """

    rows_B: torch.Tensor | None
    columns_BN: torch.Tensor
    stop: int


class _BufferLayer(CacheLayerMixin):
    """One layer's keys and values [R, M, C + 1, D], allocated at the first forward."""

    is_compileable = True
    is_sliding = False

    def __init__(self, owner: KeyValueBuffers) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, columns = self._owner.rows, self._owner.columns + 1
        # Zeros, not whatever memory holds: an unseen value counts 0 times, which is only 0 for finite ones.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], columns, key_states.shape[-1])
        self.values = value_states.new_zeros(rows, value_states.shape[1], columns, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        place = self._owner.place
        if place.rows_B is None and self.keys.shape[0] == 1:
            self.keys.index_copy_(2, place.columns_BN[0], key_states)
            self.values.index_copy_(2, place.columns_BN[0], value_states)
            return self.keys[:, :, : place.stop], self.values[:, :, : place.stop]
        rows_B = self._owner.all_rows if place.rows_B is None else place.rows_B
        self.keys[rows_B[:, None], :, place.columns_BN] = key_states.transpose(1, 2)
        self.values[rows_B[:, None], :, place.columns_BN] = value_states.transpose(1, 2)
        keys, values = self.keys[:, :, : place.stop], self.values[:, :, : place.stop]
        return (keys, values) if place.rows_B is None else (keys[rows_B], values[rows_B])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - masks are always given
        return self._owner.place.stop, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._owner.columns


class KeyValueBuffers:
    """Buffers of all layers of a target.

    Args:
        n_layers: layers with keys and values.
        rows, columns: texts, and positions of each.

    Attributes:
        hf: the cache to hand to the model.
        place: set before each forward.
    """

    def __init__(self, n_layers: int, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns = rows, columns
        self.all_rows = torch.arange(rows, device=device)
        self.place = Place(None, self.all_rows[:, None], columns)
        self._layers = [_BufferLayer(self) for _ in range(n_layers)]
        self.hf = Cache(layers=list(self._layers))

    def move(self, rows_B: torch.Tensor, source_BP: torch.Tensor, target_BP: torch.Tensor) -> None:
        """Copies columns of some rows, in every layer; all are read before one is written."""
        for layer in self._layers:
            for states in (layer.keys, layer.values):
                assert states is not None
                states[rows_B[:, None], :, target_BP] = states[rows_B[:, None], :, source_BP]


def check_buffer_memory(target: LoadedTarget, rows: int, columns: int, free_bytes: int) -> None:
    """Raises UserError if buffers of this size cannot fit into what is free."""
    facts = target.facts
    row_bytes = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * (columns + 1) * target.dtype.itemsize
    if rows * row_bytes > free_bytes:
        raise UserError(
            f"the keys and values of {rows} texts of {columns} tokens need {rows * row_bytes / 2**30:.1f} GiB, "
            f"{free_bytes / 2**30:.1f} are free",
            where="decode",
            mend=f"a batch of {max(1, free_bytes // row_bytes)} fits",
        )


@dataclass(frozen=True, slots=True)
class RowForward:
    """The tokens of one row in a forward: behind `length` committed ones, in a line or as a tree."""

    tokens: Tokens
    length: int
    tree: TreeLayout | None = None


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """What a forward of several rows is given."""

    ids_BN: torch.Tensor
    positions_BN: torch.Tensor
    columns_BN: torch.Tensor
    masks: Masks


def lay_out(
    rows: Sequence[RowForward],
    windows: Sequence[int | None],
    *,
    width: int,
    stop: int,
    spare: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ForwardInputs:
    """Inputs of one forward, each row filled up in front to `width` tokens.

    All of it is laid out on the host and brought over in a few copies, however many rows there are.

    Args:
        windows: sliding window of each layer in tokens, None for full attention.
        stop: columns that are read.
        spare: the column that filling tokens are written to.
        dtype: of the additive masks.
        device: of the forward.
    """
    table_4BN = np.zeros((4, len(rows), width), dtype=np.int64)
    ids_BN, depths_BN, columns_BN, lengths_BN = table_4BN
    columns_BN[:] = spare
    for index, row in enumerate(rows):
        n_tokens = len(row.tokens)
        first = width - n_tokens
        steps_N = np.arange(n_tokens)
        ids_BN[index, first : first + len(row.tokens.known)] = row.tokens.known
        depths_BN[index, first:] = steps_N if row.tree is None else row.tree.depths_N.numpy()
        columns_BN[index, first:] = row.length + steps_N
        lengths_BN[index] = row.length
    on_device = torch.from_numpy(table_4BN).to(device)
    positions_BN, columns = on_device[1] + on_device[3], on_device[2]
    square_BNN = _square(rows, columns != spare, width)
    by_window = {
        window: _additive(_visible(window, on_device[3, :, 0], positions_BN, columns, square_BNN, stop), dtype)
        for window in dict.fromkeys(windows)
    }
    return ForwardInputs(_with_drafts(on_device[0], rows), positions_BN, columns, _by_kind(by_window))


def _with_drafts(ids_BN: torch.Tensor, rows: Sequence[RowForward]) -> torch.Tensor:
    """The ids with those that only the device knows at the end of their rows."""
    drafts = {i: row.tokens.drafts_K for i, row in enumerate(rows) if row.tokens.drafts_K is not None}
    if not drafts:
        return ids_BN
    width = ids_BN.shape[1]
    places = [range((i + 1) * width - ids_K.shape[0], (i + 1) * width) for i, ids_K in drafts.items()]
    place_Q = torch.from_numpy(np.concatenate(places)).to(ids_BN.device)
    return ids_BN.flatten().index_copy(0, place_Q, torch.cat(list(drafts.values()))).view_as(ids_BN)


def _square(rows: Sequence[RowForward], is_real_BN: torch.Tensor, width: int) -> torch.Tensor:
    """bool [B, N, N]: which tokens of the forward each of them may see; filling ones see none and are not seen."""
    if all(row.tree is None for row in rows):
        line_NN = torch.ones(width, width, dtype=torch.bool, device=is_real_BN.device).tril()
        return is_real_BN[:, :, None] & is_real_BN[:, None, :] & line_NN
    square_BNN = np.zeros((len(rows), width, width), dtype=np.bool_)
    for index, row in enumerate(rows):
        n_tokens = len(row.tokens)
        visible_NN = np.tri(n_tokens, dtype=np.bool_) if row.tree is None else row.tree.visible_NN.numpy()
        square_BNN[index, width - n_tokens :, width - n_tokens :] = visible_NN
    return torch.from_numpy(square_BNN).to(is_real_BN.device)


def _visible(
    window: int | None,
    lengths_B: torch.Tensor,
    positions_BN: torch.Tensor,
    columns_BN: torch.Tensor,
    square_BNN: torch.Tensor,
    stop: int,
) -> torch.Tensor:
    """bool [B, N, stop]: committed columns, and the forward's own tokens as `square_BNN` says."""
    keys_C = torch.arange(stop + 1, device=lengths_B.device)
    allowed = (keys_C < lengths_B[:, None, None]).expand(-1, positions_BN.shape[1], -1)
    if window is not None:
        # A committed token's position is its column; among the new ones siblings share a position.
        allowed = allowed & (positions_BN[:, :, None] - keys_C < window)
        square_BNN = square_BNN & (positions_BN[:, :, None] - positions_BN[:, None, :] < window)
    own_BNN = columns_BN.clamp(max=stop)[:, None, :].expand_as(square_BNN)
    allowed = allowed.clone().scatter_(2, own_BNN, square_BNN)[..., :stop]
    # A filling token sees something, too: a softmax over nothing would be no number.
    allowed[..., 0] |= columns_BN >= stop
    return allowed


def _additive(visible_BNC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(visible_BNC.shape, dtype=dtype, device=visible_BNC.device)
    return mask.masked_fill_(~visible_BNC, torch.finfo(dtype).min)[:, None]


def _by_kind(by_window: dict[int | None, torch.Tensor]) -> Masks:
    """The masks as models take them: one, or one for full and one for sliding layers."""
    if len(by_window) == 1:
        return next(iter(by_window.values()))
    sliding = sorted(window for window in by_window if window is not None)
    if len(sliding) > 1:
        raise UserError(f"the target mixes sliding windows {sliding}", where="decode", mend="decode one at a time")
    return {"full_attention": by_window[None], "sliding_attention": by_window[sliding[0]]}
