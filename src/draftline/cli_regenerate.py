"""The command that lets the target answer prompts. As `cli`: read the arguments, call one room, print, return."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftline.cli_data import Device, SkipBad, Target, TemplateKwargs, TrustCode, json_object
from draftline.limits import MAX_SEED, MAX_TEMPERATURE

Source = Annotated[str, typer.Argument(help="JSONL file of prompts or conversations, hf:NAME:SPLIT, or builtin.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="JSONL file to write; a killed run goes on in it.")]
MaxNew = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens; longer ones are cut and marked.")]
MaxPrompt = Annotated[int | None, typer.Option(min=1, help="Reject longer prompts, in tokens. Default: the context.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Answer only the first prompts.")]
Retry = Annotated[bool, typer.Option("--retry-rejected", help="Ask again what an earlier run rejected.")]
Servers = Annotated[
    list[str] | None,
    typer.Option("--server", help="Address of an OpenAI-compatible server of the target; may be repeated."),
]
KeyName = Annotated[str | None, typer.Option(help="Environment variable that holds the servers' API key.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="The target's name at the servers. Default: as --target.")
]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests under way at once, over all servers.")]
PerServer = Annotated[int | None, typer.Option(min=1, help="The same at one server. Default: an equal share.")]
Kind = Annotated[str, typer.Option(help="auto, vllm, sglang, llama.cpp, transformers or openai.")]
Endpoint = Annotated[str, typer.Option(help="chat: the server renders; completions: it gets rendered token ids.")]
Timeout = Annotated[float, typer.Option(help="Longest wait for one answer, in seconds.")]
Tries = Annotated[int, typer.Option(min=1, help="Times a prompt is asked before it is rejected.")]
Patience = Annotated[float, typer.Option(help="Seconds without any server before the run gives up.")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of what is drawn.")]
Temperature = Annotated[float, typer.Option(min=0, max=MAX_TEMPERATURE, help="0 is greedy.")]
ExtraBody = Annotated[str | None, typer.Option(help='JSON put into each request, e.g. {"min_p": 0}.')]


def regenerate(
    source: Source,
    output: Output,
    target: Target,
    device: Device = "auto",
    max_new_tokens: MaxNew = 512,
    max_prompt_tokens: MaxPrompt = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 keeps all tokens.")] = 0,
    seed: Seed = 0,
    limit: Limit = None,
    server: Servers = None,
    api_key_env: KeyName = None,
    model: ModelName = None,
    concurrency: Concurrency = 64,
    per_server: PerServer = None,
    server_kind: Kind = "auto",
    endpoint: Endpoint = "chat",
    timeout_s: Timeout = 600.0,
    tries: Tries = 5,
    patience_s: Patience = 300.0,
    extra_body: ExtraBody = None,
    chat_template_kwargs: TemplateKwargs = "{}",
    retry_rejected: Retry = False,
    skip_bad_rows: SkipBad = False,
    trust_remote_code: TrustCode = False,
) -> None:
    """Let the target answer the prompts itself, so that the drafter learns the target's own words."""
    from draftline.config.schema import TargetConfig
    from draftline.data.regenerate import regenerate as run
    from draftline.data.servers.options import server_options
    from draftline.devices import resolve_devices

    rest: dict[str, Any] = {"kind": server_kind, "endpoint": endpoint, "tries": tries, "timeout_s": timeout_s}
    rest |= {"concurrency": concurrency, "per_server": per_server, "patience_s": patience_s}
    servers = server_options(server, api_key_env=api_key_env, model=model, extra_body=extra_body, **rest)
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "max_prompt_tokens": max_prompt_tokens, "limit": limit}
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    kwargs = json_object(chat_template_kwargs)
    report = run(
        source,
        output,
        target=TargetConfig(model=target, trust_remote_code=trust_remote_code, chat_template_kwargs=kwargs),
        device="cpu" if servers else resolve_devices([device])[0],
        batch_size=batch_size,
        servers=servers,
        retry_rejected=retry_rejected,
        skip_bad_rows=skip_bad_rows,
        **limits,
        **sampling,
    )
    for line in report.summary_lines():
        typer.echo(line)
