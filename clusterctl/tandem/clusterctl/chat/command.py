"""`clusterctl chat`: talk to a model in a terminal, or get one answer in a script."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tandem.clusterctl.commands import command_app, examples
from tandem.clusterctl.endpoint import EndpointFlags, first_model
from tandem.clusterctl.flags import check_positive, flagged
from tandem.clusterctl.output import Output
from tandem.core.errors import ConfigError

app = command_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags(EndpointFlags):
    """Settings of answers, and of their display."""

    system: Annotated[str, typer.Option(help="System prompt.")] = ""
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Without it, the server's default.")] = None
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer. Without it, the server's default.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None
    schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that every answer follows.")] = None
    tools: Annotated[
        Path | None, typer.Option(help="File with a JSON list of tools. In a conversation you give their results.")
    ] = None
    thinking_tokens: Annotated[int | None, typer.Option(help="Most tokens of reasoning before an answer.")] = None
    hide_reasoning: Annotated[bool, typer.Option("--hide-reasoning", help="Print answers alone.")] = False
    timeout: Annotated[float, typer.Option(help="Seconds of silence after which an answer fails.")] = 600.0
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no line with figures under an answer.")] = False


@app.command(
    epilog=examples(
        "chat",
        'chat "What is a list?" --temperature 0 --max-tokens 64',
        "chat -q < question.txt",
        'chat "A person, as JSON" --schema person.json --hide-reasoning',
        "chat --tools tools.json --thinking-tokens 512",
        "chat Hello --url https://api.example.com/v1 --model some-model --api-key-file api.key -o json",
    )
)
@flagged
def chat(
    flags: ChatFlags,
    output: Output,
    prompt: Annotated[str, typer.Argument(help="A question; - reads it from the standard input.")] = "",
) -> None:
    """Chat with a model in this terminal, or get one answer: to PROMPT, or to the content of standard input if it is
    not a terminal."""
    from tandem.clusterctl.chat.client import Asker, ChatAnswer, ChatOptions
    from tandem.clusterctl.chat.printer import say_answer, say_figures
    from tandem.clusterctl.chat.request_files import read_schema, read_tools
    from tandem.clusterctl.chat.session import Conversation, Talk
    from tandem.clusterctl.loadgen.client import CHAT, Target

    check_positive("--timeout", flags.timeout, "seconds")
    question = _question(prompt, output)
    response_format = None if flags.schema is None else read_schema(flags.schema)
    tools = None if flags.tools is None else read_tools(flags.tools)
    url = flags.address()
    target, headers = Target.of(url, CHAT), flags.headers()
    wish = ChatOptions(
        model=flags.model or first_model(url, headers, target.tls),
        temperature=flags.temperature,
        max_tokens=flags.max_tokens,
        seed=flags.seed,
        thinking_tokens=flags.thinking_tokens,
        response_format=response_format,
        tools=tools,
        timeout_s=flags.timeout,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model writes what the locale may not have
    conversation = Conversation(system=flags.system)
    with Asker(url, wish, headers, target) as asker:
        if question is None:
            raise typer.Exit(Talk(asker, conversation, is_quiet=flags.quiet, hides_thoughts=flags.hide_reasoning).run())
        answer = ChatAnswer()
        messages = conversation.messages({"role": "user", "content": question})
        if output.is_document:
            asker.ask(answer, messages, lambda text, is_thought: None)
            output.show("Chat", {"url": url, **answer.record()}, lambda found, console: None)
            return
        say_answer(asker, answer, messages, hides_thoughts=flags.hide_reasoning)
        if not flags.quiet:
            say_figures(answer)


def _question(prompt: str, output: Output) -> str | None:
    """Return the question of a single answer; None = a conversation on a terminal. Raises ConfigError without
    either."""
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if prompt == "-" or (not prompt and not has_terminal):
        try:
            prompt = sys.stdin.buffer.read().decode().strip("\n") if sys.stdin is not None else ""
        except UnicodeDecodeError as error:
            raise ConfigError("cannot read the question", why="it is not UTF-8 text", todo="Convert it") from error
    elif not prompt and sys.stdout.isatty() and not output.is_document:
        return None
    if not prompt.strip():
        raise ConfigError(
            "no question was given",
            why="a conversation takes a terminal as standard input and output, and no -o json",
            todo="Give one as an argument or on the standard input",
        )
    return prompt
