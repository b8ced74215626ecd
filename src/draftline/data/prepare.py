"""`draftline prepare`: conversations in, token shards with loss masks out.

    sources ─> rows, checked ─> identical ones dropped ─> ids + mask, proven ─> train or validation shards ─> manifest

One conversation is held at a time, and about 200 bytes for each one seen. A conversation is in the training or in the
validation part as a whole, and so are all conversations that open with the same words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from draftline.config.schema import TargetConfig
from draftline.data.chat import ChatEncoder, EncodedConversation, RejectedError
from draftline.data.conversations import Conversation, Tally, read_conversations
from draftline.data.manifest import DatasetFacts, DatasetManifest, SourceRecord
from draftline.data.messages import BadRowError, Turns, canonical_json, require_answer
from draftline.data.shards import ShardWriter
from draftline.data.template import ChatTemplate
from draftline.errors import UserError

VALIDATION_FOLDER = "validation"


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What `prepare` did. `in_rows == out_rows + rejected` always holds.

    Attributes:
        output: the folder written.
        manifest: of the training part.
        validation: of the validation part in `output/validation`, or None.
        rejected_by_reason: rows turned away.
        first_bad: the first row that was skipped as bad, for the reader to look at.
    """

    output: Path
    manifest: DatasetManifest
    validation: DatasetManifest | None
    in_rows: int
    rejected_by_reason: dict[str, int]
    first_bad: str | None = None

    @property
    def out_rows(self) -> int:
        return self.manifest.n_samples + (self.validation.n_samples if self.validation else 0)

    @property
    def rejected(self) -> int:
        return sum(self.rejected_by_reason.values())

    def summary_lines(self) -> list[str]:
        """A few lines for the user."""
        balance = "==" if self.in_rows == self.out_rows + self.rejected else "!="
        lines = [f"rows: {self.in_rows} in {balance} {self.out_rows} out + {self.rejected} rejected"]
        lines += [f"  rejected, {reason}: {count}" for reason, count in sorted(self.rejected_by_reason.items())]
        if self.first_bad:
            lines.append(f"  first bad row: {self.first_bad}")
        for manifest in filter(None, (self.manifest, self.validation)):
            share = 100 * manifest.n_supervised / manifest.n_tokens
            lines.append(
                f"{'samples' if manifest.part == 'all' else manifest.part}: {manifest.n_samples} with "
                f"{manifest.n_tokens} tokens, {manifest.n_supervised} supervised ({share:.0f} %), "
                f"{manifest.n_answer_cut} with a cut answer"
            )
            if manifest.n_turns_left_out:
                lines.append(f"  turns unsupervised because the template rewrites them: {manifest.n_turns_left_out}")
        return [*lines, f"written to {self.output}"]


@dataclass(slots=True)
class _Part:
    """One part of the split in the making."""

    writer: ShardWriter
    name: Literal["all", "train", "validation"]
    n_answer_cut: int = 0
    n_turns_left_out: int = 0

    def add(self, conversation: Conversation, encoded: EncodedConversation) -> None:
        cut = conversation.answer_cut or encoded.truncated
        self.writer.add(conversation.id, encoded.input_ids, encoded.loss_mask, answer_cut=cut)
        self.n_answer_cut += cut
        self.n_turns_left_out += encoded.turns_left_out

    def finish(self, facts: DatasetFacts) -> DatasetManifest:
        own = {"part": self.name, "n_answer_cut": self.n_answer_cut, "n_turns_left_out": self.n_turns_left_out}
        return self.writer.finish(facts.model_copy(update=own))


@dataclass(slots=True)
class _Split:
    """Sends each conversation to the training or the validation part, by a hash of how it opens."""

    train: _Part
    validation: _Part | None
    fraction: float
    seed: int
    seen: set[bytes] = field(default_factory=set)

    def is_new(self, conversation: Conversation) -> bool:
        digest = _digest(canonical_json(conversation.messages, conversation.tools))
        known = digest in self.seen
        self.seen.add(digest)
        return not known

    def part_of(self, conversation: Conversation) -> _Part:
        if self.validation is None:
            return self.train
        roles = [message["role"] for message in conversation.messages]
        opening = conversation.messages[: roles.index("assistant")]
        digest = _digest(f"split {self.seed} ".encode() + canonical_json(opening, None))
        return self.validation if int.from_bytes(digest[:8], "big") < self.fraction * 2**64 else self.train


def prepare(
    sources: Sequence[str],
    output: Path,
    *,
    target: TargetConfig,
    max_tokens: int,
    turns: str = "all",
    skip_bad_rows: bool = False,
    validation_fraction: float = 0.0,
    seed: int = 0,
    progress: bool = False,
) -> PrepareReport:
    """Write the conversations of `sources` as a data set for `target` into the folder `output`.

    Args:
        sources: see `conversations`.
        output: must not hold anything yet; appears only when everything is written.
        max_tokens: longer samples are cut at the end and marked; those left without labels are dropped and counted.
        turns: `all` or `last`: which assistant turns are supervised.
        skip_bad_rows: count bad rows instead of refusing them.
        validation_fraction: share of conversations for `output/validation`; 0 makes none.
        seed: of the split.
        progress: show progress on standard error if that is a terminal.

    Raises:
        UserError: bad input, or an output that cannot be written.
    """
    _check(max_tokens, turns, validation_fraction)
    encoder = ChatEncoder(load_template(target), max_tokens=max_tokens, turns=cast(Turns, turns))
    tally = Tally(skip_bad_rows)
    with ExitStack() as stack:
        split = _open_parts(stack, output, validation_fraction, seed)
        rows = read_conversations(sources, tally)
        for conversation in stack.enter_context(_shown(rows, "preparing", progress)):
            _take(conversation, encoder, split, tally)
        facts = _facts(encoder, tally)
        validation = _finish_validation(split, facts)
        manifest = split.train.finish(facts)
    return PrepareReport(output, manifest, validation, tally.in_rows, dict(tally.rejected), tally.first_bad)


def load_template(config: TargetConfig) -> ChatTemplate:
    """The target's tokenizer and chat template, with every stop token that is known without its weights.

    Raises:
        UserError: no tokenizer, or none with a chat template.
    """
    from draftline.target.facts import generation_eos_ids, model_source
    from draftline.target.load import load_tokenizer, tokenizer_stop_ids

    tokenizer = load_tokenizer(config)
    stops = set(tokenizer_stop_ids(tokenizer))
    if model_source(config).gguf_file is None:
        stops.update(generation_eos_ids(config, None))
    return ChatTemplate(tokenizer, template_kwargs=config.chat_template_kwargs, stop_token_ids=sorted(stops))


def _check(max_tokens: int, turns: str, validation_fraction: float) -> None:
    if max_tokens < 2:
        raise UserError(f"max_tokens is {max_tokens}", mend="set it to at least 2")
    if turns not in ("all", "last"):
        raise UserError(f"turns is {turns!r}", mend="set it to all or last")
    if not 0 <= validation_fraction < 1:
        raise UserError(f"validation_fraction is {validation_fraction}", mend="set it to at least 0 and below 1")


def _open_parts(stack: ExitStack, output: Path, fraction: float, seed: int) -> _Split:
    writer = stack.enter_context(ShardWriter(output))
    if fraction == 0:
        return _Split(_Part(writer, "all"), None, fraction, seed)
    inner = stack.enter_context(ShardWriter(writer.staging_path / VALIDATION_FOLDER))
    return _Split(_Part(writer, "train"), _Part(inner, "validation"), fraction, seed)


def _take(conversation: Conversation, encoder: ChatEncoder, split: _Split, tally: Tally) -> None:
    """Encode one conversation into its part, or count why not."""
    try:
        require_answer(conversation.messages)
    except BadRowError as error:
        tally.reject(error.reason, str(error), f"{conversation.file}:{conversation.line}")
        return
    if not split.is_new(conversation):
        tally.drop("duplicate")
        return
    try:
        encoded = _encode(conversation, encoder)
    except RejectedError as error:
        tally.drop(error.reason)
        return
    split.part_of(conversation).add(conversation, encoded)


def _encode(conversation: Conversation, encoder: ChatEncoder) -> EncodedConversation:
    if conversation.answer_token_ids is not None:
        return encoder.encode_generated(
            conversation.messages,
            conversation.tools,
            conversation.answer_token_ids,
            prompt_hash=conversation.prompt_hash,
        )
    turns: Turns = "last" if conversation.turns == "last" else encoder.turns
    return encoder.encode(conversation.messages, conversation.tools, turns=turns, answer_cut=conversation.answer_cut)


def _facts(encoder: ChatEncoder, tally: Tally) -> DatasetFacts:
    return DatasetFacts(
        tokenizer_fingerprint=encoder.template.fingerprint,
        template_hash=encoder.template.template_hash,
        vocab_size=len(encoder.template.tokenizer),
        max_tokens=encoder.max_tokens,
        turns=encoder.turns,
        sources=tuple(
            SourceRecord(name=name, in_rows=count, sha256=file_sha256(name))
            for name, count in tally.rows_of_source.items()
        ),
        in_rows=tally.in_rows,
        rejected=dict(tally.rejected),
    )


def _finish_validation(split: _Split, facts: DatasetFacts) -> DatasetManifest | None:
    part = split.validation
    if part is None:
        return None
    if part.writer.n_samples == 0 and split.train.writer.n_samples > 0:
        raise UserError("the validation part would be empty", mend="raise validation_fraction or give more rows")
    if part.writer.n_samples > 0 and split.train.writer.n_samples == 0:
        raise UserError("the training part would be empty", mend="lower validation_fraction or give more rows")
    return part.finish(facts)


def file_sha256(name: str) -> str | None:
    """Hash of a source that is one file; None for others."""
    path = Path(name)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _shown(rows: Iterator[Conversation], label: str, enabled: bool) -> Iterator[Iterable[Conversation]]:
    """The rows, counted in a progress line on standard error if that is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as bar:
        yield bar.track(rows, description=label)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
