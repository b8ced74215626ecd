"""The description of a prepared data set: what is in it, where it came from, and how to tell that it is whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftline.data.template import FINGERPRINT_PREFIX, tokenizer_fingerprint
from draftline.errors import UserError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
_FORMAT = "draftline-dataset"
LOW_LABEL_SHARE = 0.75  # below it the answers are hardly the target's
Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardRecord(_Record):
    """One Arrow IPC file of the data set."""

    name: str = Field(pattern=r"^shard-[0-9]+\.arrow$")
    n_samples: Count
    n_bytes: Count
    sha256: str


class SourceRecord(_Record):
    """One source as it was named, with the rows read from it; `sha256` of the file where it is one.

    Attributes:
        weight: its share in a mix, as asked for; None without a mix.
        n_samples: its samples in this part; None where that was not counted.
    """

    name: str
    in_rows: Count
    sha256: str | None = None
    weight: float | None = None
    n_samples: Count | None = None


class Spread(_Record):
    """How a number is spread over the samples (nearest rank)."""

    min: Count
    median: Count
    p90: Count
    p99: Count
    max: Count


class DatasetStatistics(_Record):
    """What the samples look like.

    Attributes:
        tokens, prompt_tokens, supervised_tokens: of a sample; the prompt is what comes before the first label.
        n_turns: assistant turns that are supervised.
        categories: samples of each label that rows had.
    """

    tokens: Spread
    prompt_tokens: Spread
    supervised_tokens: Spread
    n_turns: Count
    categories: dict[str, Count] = Field(default_factory=dict)


class Decontamination(_Record):
    """Evaluation prompts that samples were kept clear of: the files, their hashes, and the words of a shared run."""

    files: tuple[SourceRecord, ...]
    n_words: int = Field(ge=1)


class LabelCheck(_Record):
    """How often the label is the target's own first choice, over some samples.

    Attributes:
        target: its fingerprint.
        n_samples, n_labels: looked at.
        n_own: labels that are the target's argmax.
        seed: of the choice of samples.
    """

    target: str
    n_samples: int = Field(ge=1)
    n_labels: int = Field(ge=1)
    n_own: int = Field(ge=0)
    seed: int

    @property
    def share(self) -> float:
        """Of labels that are the target's argmax, 0..1."""
        return self.n_own / self.n_labels


class DatasetFacts(_Record):
    """What the writer of a data set must know about it besides the samples themselves.

    Attributes:
        tokenizer_fingerprint: of the tokenizer that made the ids; see `template.tokenizer_fingerprint`.
        template_hash: of the chat template and its arguments.
        vocab_size: ids are below it.
        max_tokens: the length limit of a sample.
        turns: which assistant turns are supervised.
        in_rows, rejected: rows read, and rows turned away by reason.
        n_answer_cut: samples whose answer was cut by a length limit (kept).
        n_turns_left_out: assistant turns left unsupervised because the template rewrites them.
        part: which part of a split this is.
        validation_fraction, seed: of the split, and of the mix.
        max_prompt_tokens, min_supervised_tokens: limits by which samples were rejected.
    """

    tokenizer_fingerprint: str
    template_hash: str
    vocab_size: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    turns: Literal["all", "last"] = "all"
    sources: tuple[SourceRecord, ...] = ()
    in_rows: Count = 0
    rejected: dict[str, Count] = Field(default_factory=dict)
    n_answer_cut: Count = 0
    n_turns_left_out: Count = 0
    part: Literal["all", "train", "validation"] = "all"
    validation_fraction: float = Field(default=0.0, ge=0.0, lt=1.0)
    seed: int = 0
    max_prompt_tokens: int | None = None
    min_supervised_tokens: int = 0
    decontamination: Decontamination | None = None
    statistics: DatasetStatistics | None = None


class DatasetManifest(DatasetFacts):
    """`manifest.json` of a prepared data set."""

    format: Literal["draftline-dataset"] = "draftline-dataset"
    schema_version: Literal[1] = 1
    n_samples: Count
    n_tokens: Count
    n_supervised: Count
    shards: tuple[ShardRecord, ...]
    label_check: LabelCheck | None = None

    @property
    def fingerprint(self) -> str:
        """Changes whenever the samples, their order or their tokenizer do; not when the folder moves."""
        content = [self.schema_version, self.tokenizer_fingerprint, [shard.sha256 for shard in self.shards]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(path: Path) -> DatasetManifest:
    """Read and check `path/manifest.json`.

    Raises:
        UserError: no folder, no manifest, not ours, written by a newer draftline, or damaged.
    """
    file = path / MANIFEST_NAME
    mend = "give a folder written by `draftline prepare`"
    if not file.is_file():
        missing = f"no {MANIFEST_NAME} in it" if path.is_dir() else "no such folder"
        raise UserError(missing, where=str(path), mend=mend)
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"not readable as JSON ({error})", where=str(file), mend="prepare the data again") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UserError("not the manifest of a draftline data set", where=str(file), mend=mend)
    _check_version(content, file)
    try:
        return DatasetManifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UserError(f"{field}: {first['msg']}", where=str(file), mend="prepare the data again") from None


def require_tokenizer(manifest: DatasetManifest, tokenizer: Any, *, where: str) -> None:
    """Refuse a data set whose ids were made by another tokenizer than the target's.

    Ids that no tokenizer made, and data whose fingerprint is of another kind, cannot be judged and pass.

    Raises:
        UserError: naming both fingerprints.
    """
    made_with = manifest.tokenizer_fingerprint
    if not made_with.startswith(FINGERPRINT_PREFIX):
        return
    own = tokenizer_fingerprint(tokenizer, manifest.vocab_size)
    if made_with != own:
        raise UserError(
            f"the data was prepared with tokenizer {_short(made_with)}, the target has {_short(own)}",
            where=where,
            mend="prepare the data with this target",
        )


def _short(fingerprint: str) -> str:
    return fingerprint.removeprefix(FINGERPRINT_PREFIX)[:12]


def _check_version(content: dict[str, Any], file: Path) -> None:
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"schema version {version} is newer than {SCHEMA_VERSION}, the newest this draftline reads",
            where=str(file),
            mend="update draftline",
        )
    if version != SCHEMA_VERSION:
        raise UserError(f"unknown schema version {version!r}", where=str(file), mend="prepare the data again")
