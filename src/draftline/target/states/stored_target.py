"""What a drafter borrows of its target, kept beside the states, so that training from them loads no target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from draftline.data.storage import disk_errors, write_text_atomic
from draftline.errors import UserError
from draftline.records import FrozenEmbedding, FrozenHead
from draftline.target.load import LoadedTarget
from draftline.target.states.manifest import MANIFEST_NAME
from draftline.target.states.tensor_files import save_whole, sha256_of

WEIGHTS, FACTS = "borrowed.safetensors", "borrowed.json"


@dataclass(frozen=True, eq=False)
class StoredTarget:
    """Stands in for a LoadedTarget where only its embedding and head are needed.

    Attributes:
        device, dtype: of the two weights.
        fingerprint: of the target that they are from.
        final_norm: the target's, where states come before it.
    """

    embedding: FrozenEmbedding
    head: FrozenHead
    device: torch.device
    dtype: torch.dtype
    stop_token_ids: frozenset[int]
    fingerprint: str
    final_norm: nn.Module | None = None

    @property
    def vocab_size(self) -> int:
        """V, rows of the embedding."""
        return int(self.embedding.weight_VH.shape[0])


def store_target(target: LoadedTarget | StoredTarget, folder: Path) -> None:
    """Writes embedding and head of `target` (once, if they are tied) to `folder`, unless they are there.

    What a capture left that was killed before its first shard belongs to no states, and is replaced.

    Raises:
        UserError: the disk is full, or the folder holds those of another target.
    """
    if (folder / FACTS).is_file() and (folder / MANIFEST_NAME).is_file():
        found = _read_facts(folder)["fingerprint"]
        if found != target.fingerprint:
            raise UserError(
                f"holds states of another target: fingerprint is {found[:16]} there, {target.fingerprint[:16]} here",
                where=str(folder),
                mend="capture into another folder",
            )
        return
    embedding, head = target.embedding.weight_VH, target.head.weight_VH
    weights = {"embedding": embedding.cpu().contiguous()}
    if head.data_ptr() != embedding.data_ptr():
        weights["head"] = head.cpu().contiguous()
    if target.head.bias_V is not None:
        weights["head_bias"] = target.head.bias_V.cpu().contiguous()
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FACTS).unlink(missing_ok=True)
        _, digest = save_whole(weights, folder / WEIGHTS)
        facts = {
            "fingerprint": target.fingerprint,
            "embedding_scale": target.embedding.scale,
            "head_multiplier": target.head.multiplier,
            "head_softcap": target.head.softcap,
            "stop_token_ids": sorted(target.stop_token_ids),
            "sha256": digest,
        }
        write_text_atomic(folder / FACTS, json.dumps(facts, indent=2) + "\n")


def load_stored_target(folder: Path, device: torch.device, *, share_with: StoredTarget | None = None) -> StoredTarget:
    """Reads what `store_target` wrote.

    Args:
        share_with: already read from the same folder; on the same device nothing is copied.

    Raises:
        UserError: missing or changed.
    """
    if share_with is not None and share_with.device == device:
        return share_with
    facts = _read_facts(folder)
    file, mend = folder / WEIGHTS, "capture the states again"
    try:
        if sha256_of(file) != facts["sha256"]:
            raise UserError("was changed: its hash is not the recorded one", where=str(file), mend=mend)
        weights = load_file(file, device=str(device))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=str(file), mend=mend) from error
    try:
        return _stored_target(facts, weights, device)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"does not describe a target ({error})", where=str(folder / FACTS), mend=mend) from error


def _stored_target(facts: dict[str, Any], weights: dict[str, torch.Tensor], device: torch.device) -> StoredTarget:
    embedding = weights["embedding"]
    head = weights.get("head", embedding)
    if embedding.ndim != 2 or head.shape != embedding.shape:
        raise ValueError(f"embedding {list(embedding.shape)}, head {list(head.shape)}")
    return StoredTarget(
        embedding=FrozenEmbedding(embedding, float(facts["embedding_scale"])),
        head=FrozenHead(
            weight_VH=head,
            bias_V=weights.get("head_bias"),
            multiplier=float(facts["head_multiplier"]),
            softcap=None if facts["head_softcap"] is None else float(facts["head_softcap"]),
        ),
        device=device,
        dtype=embedding.dtype,
        stop_token_ids=frozenset(int(token) for token in facts["stop_token_ids"]),
        fingerprint=str(facts["fingerprint"]),
    )


def _read_facts(folder: Path) -> dict[str, Any]:
    file, mend = folder / FACTS, "capture the states again"
    try:
        facts = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read ({error})", where=str(file), mend=mend) from error
    names = {"fingerprint", "embedding_scale", "head_multiplier", "head_softcap", "stop_token_ids", "sha256"}
    if not isinstance(facts, dict) or not names <= facts.keys():
        raise UserError("does not describe a target", where=str(file), mend=mend)
    return facts
