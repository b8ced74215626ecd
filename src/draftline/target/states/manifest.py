"""The description of a folder of states: of which target, which data, which layers, in which numbers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftline.errors import UserError
from draftline.target.facts import TargetFacts

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1
StoredDtype = Literal["float32", "bfloat16", "float16", "fp8"]
_MOST_BYTES = 1 << 30


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StatesIdentity(_Record):
    """What must be the same for states to be used. Compared field by field; a difference is told with both values.

    Attributes:
        model: last part of the target's name, so that a moved folder is still the same.
        facts: hash of the target's sizes and conventions, from its configuration alone.
        fingerprint: of the target's weights.
        quantization: what loading made of them (`target.quantization`); None: as the files are.
        backend: where the target ran (`target.backend`); the last bits differ between them.
        fused_norms: norms ran in one kernel each (`target.fused_norms`); the last bits differ here, too.
        taps: 0-based layers whose output is kept.
        final_norm: "post": the last hidden state is kept, after the final norm; None: it is not kept.
        dtype: of the numbers on disk; fp8 has a scale for each token and tap.
        compute_dtype: of the target's forward, and of what is read back.
        data: fingerprint of the prepared data set.
    """

    model: str
    revision: str | None
    facts: str
    fingerprint: str
    quantization: str | None
    backend: str
    taps: tuple[int, ...]
    final_norm: Literal["post"] | None
    hidden_size: int = Field(ge=1)
    dtype: StoredDtype
    compute_dtype: Literal["float32", "bfloat16", "float16"]
    data: str
    fused_norms: bool = False


class StatesShard(_Record):
    """One safetensors file: `N.taps` [T, L * H], with fp8 also `N.scales` [T, L]; `N.final` [T, H] if it is kept."""

    name: str
    n_bytes: int = Field(ge=0)
    sha256: str
    samples: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...]


class StatesManifest(_Record):
    """manifest.json of a folder of states.

    Attributes:
        fp8_error: largest relative error of a sample's taps, |a - b| / |b|, measured when they were rounded; 0 without.
    """

    format: Literal["draftline-states"] = "draftline-states"
    schema_version: Literal[1] = 1
    identity: StatesIdentity
    shards: tuple[StatesShard, ...] = ()
    n_tokens: int = Field(default=0, ge=0)
    fp8_error: float = 0.0

    @property
    def n_samples(self) -> int:
        """Samples of all shards."""
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def n_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.n_bytes for shard in self.shards)


def model_name(model: str) -> str:
    """The last part of a model's name or path: a folder may move."""
    return PurePath(model).name


def facts_hash(facts: TargetFacts) -> str:
    """Changes with everything that a drafter takes from a target's configuration."""
    described = json.dumps(asdict(facts), sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def read_states_manifest(folder: Path) -> StatesManifest:
    """Reads and checks `folder/manifest.json`.

    Raises:
        UserError: no folder, not ours, damaged, or a shard that is missing or of another size.
    """
    file, mend = folder / MANIFEST_NAME, "give a folder written by `draftline capture`"
    if not file.is_file():
        raise UserError(f"holds no {MANIFEST_NAME}", where=str(folder), mend=mend)
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UserError("is far too large", where=str(file), mend=mend)
        content: Any = json.loads(file.read_bytes())
        if not isinstance(content, dict) or content.get("format") != "draftline-states":
            raise UserError("is not the manifest of captured states", where=str(file), mend=mend)
        manifest = StatesManifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(what, where=str(file), mend="capture the states again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"not readable as JSON ({error})", where=str(file), mend="capture the states again") from None
    for shard in manifest.shards:
        _check_shard(folder, shard)
    return manifest


def _check_shard(folder: Path, shard: StatesShard) -> None:
    file = folder / shard.name
    if Path(shard.name).name != shard.name or len(shard.name) > 255 or not file.is_file():
        raise UserError("shard is missing", where=str(file), mend="capture the states again")
    size = file.stat().st_size
    if size != shard.n_bytes:
        what = f"shard has {size} bytes, the manifest says {shard.n_bytes}"
        raise UserError(what, where=str(file), mend="capture the states again")


def require_same_states(found: StatesIdentity, wanted: StatesIdentity, folder: Path, *, adds: bool) -> None:
    """Refuses states that are not those that a run wants.

    Args:
        wanted: without a fingerprint where the target is not loaded; it is not compared then.
        adds: states will be added to the folder, not only read.

    Raises:
        UserError: names each field that differs, with both values.
    """
    differing = []
    for name in StatesIdentity.model_fields:
        there, here = getattr(found, name), getattr(wanted, name)
        if name == "final_norm" and here is None and not adds:
            continue  # kept, but not asked for; what adds to the folder has to keep it as well
        if name == "fingerprint" and not here:
            continue
        if there != here:
            differing.append(f"{name} is {_short(there)} there, {_short(here)} here")
    if differing:
        raise UserError(
            f"holds other states: {'; '.join(differing)}",
            where=str(folder),
            mend="capture into another folder, or give the run that they were captured for",
        )


def _short(value: Any) -> str:
    text = "none" if value is None else str(list(value) if isinstance(value, tuple) else value)
    return text[:16] if len(text) >= 32 and text.isalnum() else text
