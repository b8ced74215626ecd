"""`draftline regenerate`: the target answers the prompts itself, so that labels are its own words.

    source ─> rows, checked ─> prompt ids ─┬─> batches of similar length ─> the target, in this process ─┬─> append +
                                           └─> several at once ─> servers that serve the target ─────────┘   fsync

Of each conversation the part up to its last user (or tool) turn is answered; earlier answers stay as context and are
marked as not the target's. The source is read twice: once to find bad rows before any weight is loaded or any server
is asked, once to work.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftline.config.schema import TargetConfig
from draftline.data.answer_log import AnswerLog
from draftline.data.chat import answer_text, ids_hash
from draftline.data.conversations import Conversation
from draftline.data.prepare import file_sha256, load_template
from draftline.data.prompts import BUILTIN_SOURCE, builtin_prompts
from draftline.data.regenerate_job import RegenerateJob, RegenerateReport, Scan, Shown, answer_row, progress_bar
from draftline.data.sampling import Prompt, Sampling
from draftline.data.servers.options import ServerOptions
from draftline.data.template import ChatTemplate
from draftline.errors import UserError
from draftline.limits import MAX_SEED, MAX_TEMPERATURE, MIN_TEMPERATURE, is_temperature

if TYPE_CHECKING:
    from draftline.data.answering import Answer
    from draftline.target.load import LoadedTarget

__all__ = ["RegenerateReport", "regenerate"]

WINDOW_BATCHES, MOST_AT_ONCE = 64, 1_000_000
_TEMPERATURES = f"0, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"


def regenerate(
    source: str,
    output: Path,
    *,
    target: TargetConfig,
    device: str,
    max_new_tokens: int,
    batch_size: int = 16,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    skip_bad_rows: bool = False,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    servers: ServerOptions | None = None,
    retry_rejected: bool = False,
    progress: bool = True,
) -> RegenerateReport:
    """Answer every prompt of `source` with the target and write `output` (`.jsonl`), a run of `prepare`'s input.

    Called again with the same settings it goes on where it was; `limit`, `batch_size`, `device`, `skip_bad_rows` and
    the servers may change.

    Args:
        source: see `conversations`, or `builtin` for the project's own prompts.
        device: `cpu`, `cuda:0`, ...; unused with servers.
        max_new_tokens: length limit of an answer; longer ones are cut, kept and marked.
        temperature, top_p, top_k, seed: see `answering`; temperature 0 is greedy.
        skip_bad_rows: count bad rows instead of refusing them.
        limit: only the first usable rows of the source.
        max_prompt_tokens: longer prompts are counted and left out; None: what the target's context leaves room for.
        servers: let these answer instead of loading the target; of the target only its tokenizer is read.
        retry_rejected: ask again what earlier runs rejected.
        progress: show progress on standard error if that is a terminal, and lines about servers.

    Raises:
        UserError: bad input, a file begun with other settings, prompts or another target, or not a single answer.
    """
    sampling = Sampling(temperature, top_p, top_k, seed)
    _check(max_new_tokens, batch_size, sampling)
    source = str(builtin_prompts()) if source == BUILTIN_SOURCE else source
    with AnswerLog(output, retry_rejected=retry_rejected) as log:
        scan = Scan.of(source, limit, log, skip_bad_rows=skip_bad_rows)
        template = load_template(target)
        log.settle(_settings(source, template, max_new_tokens, max_prompt_tokens, sampling))
        job = RegenerateJob(source, limit, template, max_prompt_tokens, log)
        if scan.n_settled < scan.n_prompts:
            with progress_bar(progress, scan.n_prompts, scan.n_settled) as shown:
                _answer_left(job, target, servers or device, sampling, max_new_tokens, batch_size, shown)
        log.append([], [])  # what was rejected without being asked
        report = scan.report(job)
        counts = {"in": report.in_rows, "out": report.out_rows, "rejected": report.rejected_by_reason}
        log.close_with(counts | job.details)
    report.require_answers()
    return report


def _answer_left(
    job: RegenerateJob,
    target: TargetConfig,
    by: ServerOptions | str,
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int,
    shown: Shown,
) -> None:
    """Answer what is left, `by` servers or by the target on a device of this process."""
    if isinstance(by, str):
        loaded = _load(target, by, job.template, job.log)
        _answer_all(job, loaded, max_new_tokens, batch_size, sampling, shown)
        return
    from draftline.data.servers.answering import answer_with_servers

    answer_with_servers(job, target, by, sampling, max_new_tokens, shown)


def _answer_all(
    job: RegenerateJob, target: LoadedTarget, max_new_tokens: int, batch_size: int, sampling: Sampling, shown: Shown
) -> None:
    """Answer what is left, window by window: sorted within a window, so that memory stays bounded."""
    from draftline.data.answering import answer_batch, batches_of

    if job.max_prompt_tokens is None:
        job.max_prompt_tokens = target.facts.max_position_embeddings - max_new_tokens
    left = job.prompts_left()
    while window := list(islice(left, batch_size * WINDOW_BATCHES)):
        conversations = {prompt.id: conversation for conversation, prompt in window}
        prompts = [prompt for _, prompt in window]
        for batch in batches_of(prompts, batch_size, same_length=_apart(target)):
            answers = answer_batch(target, batch, max_new_tokens=max_new_tokens, sampling=sampling)
            records = [_record(job.template, conversations[p.id], p, a) for p, a in zip(batch, answers, strict=True)]
            empty = [(p.id, "empty answer") for p, record in zip(batch, records, strict=True) if record is None]
            job.log.append([record for record in records if record is not None], empty)
            job.new_tokens += sum(len(answer.token_ids) for answer in answers)
            shown.advance(len(batch))


def _apart(target: LoadedTarget) -> bool:
    """True if prompts of different lengths would disturb each other: by padding in a recurrent state, or by the
    longest one's rotary frequencies.
    """
    return target.has_recurrent_layers or target.facts.rope_changes_at is not None


def _record(
    template: ChatTemplate, conversation: Conversation, prompt: Prompt, answer: Answer
) -> dict[str, Any] | None:
    """The line to write, or None if the target said nothing."""
    text = answer_text(template, answer.token_ids)
    if not text.strip():
        return None
    return answer_row(conversation, {"role": "assistant", "content": text}, cut=answer.cut) | {
        "answer_token_ids": answer.token_ids,
        "prompt_hash": ids_hash(prompt.input_ids),
    }


def _settings(
    source: str,
    template: ChatTemplate,
    max_new_tokens: int,
    max_prompt_tokens: int | None,
    sampling: Sampling,
) -> dict[str, Any]:
    """What decides an answer, as far as it is known before the target is loaded."""
    prompts = file_sha256(source)
    return {
        "prompts": prompts or source,
        "tokenizer": template.fingerprint,
        "template": template.template_hash,
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens or "context",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
    }


def _load(config: TargetConfig, device: str, template: ChatTemplate, log: AnswerLog) -> LoadedTarget:
    from draftline.target.load import load_target

    loaded = load_target(config, device, tokenizer=template.tokenizer)
    stops = sorted(loaded.stop_token_ids)
    log.settle({"target": loaded.fingerprint, "dtype": str(loaded.dtype), "stop_token_ids": stops})
    return loaded


def _check(max_new_tokens: int, batch_size: int, sampling: Sampling) -> None:
    wrong = [
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("batch_size", batch_size, 1 <= batch_size <= MOST_AT_ONCE, f"1 to {MOST_AT_ONCE}"),
        ("temperature", sampling.temperature, is_temperature(sampling.temperature), _TEMPERATURES),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 or more"),
        ("seed", sampling.seed, 0 <= sampling.seed <= MAX_SEED, f"0 to {MAX_SEED}"),
    ]
    for name, value, is_good, allowed in wrong:
        if not is_good:
            raise UserError(f"{name} is {value}", mend=f"set it to {allowed}")
