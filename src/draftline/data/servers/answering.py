"""`regenerate` with servers: what the target and the servers allow, the settings recorded, and the report's lines."""

from __future__ import annotations

from draftline.config.schema import TargetConfig
from draftline.data.regenerate_job import RegenerateJob, Shown
from draftline.data.sampling import Sampling
from draftline.data.servers.asking import AskingReport, Listener, ask_servers
from draftline.data.servers.client import require_client
from draftline.data.servers.options import ServerOptions
from draftline.data.servers.pool import ServerPool
from draftline.data.servers.protocol import Asking
from draftline.data.servers.verify import AnswerVerifier
from draftline.errors import UserError


def answer_with_servers(
    job: RegenerateJob,
    target: TargetConfig,
    options: ServerOptions,
    sampling: Sampling,
    max_new_tokens: int,
    shown: Shown,
) -> None:
    """Answer what is left of a job.

    Raises:
        UserError: no client installed, wrong servers or options, or a file begun in another way.
        DraftlineError: the servers are gone for too long.
        RunStoppedError: stopped by a signal.
    """
    require_client()
    template, model = job.template, options.model or target.model
    asking = Asking(
        sampling,
        max_new_tokens,
        options.endpoint,
        target.chat_template_kwargs,
        sorted(template.stop_ids),
        options.extra_body,
    )
    job.log.settle(
        {"target": f"served as {model}", "endpoint": options.endpoint, "extra_body": dict(options.extra_body)}
    )
    context = _context_tokens(target)

    def on_open(pool: ServerPool) -> None:
        served = [server.model for server in pool.servers if server.model is not None]
        limits = [limit for limit in (context, *(model.max_tokens for model in served)) if limit is not None]
        if job.max_prompt_tokens is None and limits:
            job.max_prompt_tokens = min(limits) - max_new_tokens
            if job.max_prompt_tokens < 1:
                raise UserError(
                    f"max_new_tokens is {max_new_tokens}, the context is {min(limits)}", mend="lower --max-new-tokens"
                )
        requests = {model.kind: asking.fields(model.kind) for model in served}
        job.log.describe({"servers": [{"url": server.url} for server in pool.servers], "requests": requests})

    listener = Listener(on_open, shown.advance, shown.tell)
    verifier = AnswerVerifier(template, options.endpoint)
    report = ask_servers(job.log, job.prompts_left(), asking, verifier, options, model=model, listener=listener)
    job.new_tokens = report.new_tokens
    job.notes += _lines(report)
    job.details |= {"servers": report.servers, "retokenized": report.retokenized}


def _context_tokens(target: TargetConfig) -> int | None:
    from draftline.target.facts import target_facts

    return target_facts(target).max_position_embeddings


def _lines(report: AskingReport) -> list[str]:
    lines = [
        f"{server['url']}: {server['answers']} answers, {server['faults']} faults, {server['outages']} outages"
        for server in report.servers
    ]
    verdicts = ", ".join(f"{verdict} {count}" for verdict, count in sorted(report.retokenized.items()))
    if verdicts:
        lines.append(f"answers tokenized again here, against the server: {verdicts}")
    if report.first_reject:
        lines.append(f"first rejected prompt: {report.first_reject}")
    return lines
