"""`reft-cli`: status, recover, purge, timeline, demo. Exit codes are the same for all verbs.

0 as asked   1 failed   2 wrong usage   3 WARN (with --check)   4 ERR (with --check), not survived, or not recoverable
10 no daemon   11 no such job   129 its terminal was closed   130 interrupted by Ctrl-C   143 ended by SIGTERM
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
import grpc

from reft import __version__
from reft.cli import recover_view, status_text, status_view
from reft.cli.ask import UnknownJob, ask, local_address
from reft.cli.recover import RecoverCommand, replacement_here
from reft.cli.signals import unwinding
from reft.cli.survey import steady, surveys
from reft.cli.timeline import collect, write
from reft.config import allows_colour
from reft.core.budget import size
from reft.core.status.health import Health
from reft.core.text import counted
from reft.errors import ConfigError, DaemonUnavailable, ReftError
from reft.wire import rpc
from reft.wire.v1 import daemon_pb2 as pb

EXIT_FAILED, EXIT_USAGE, EXIT_LOST, EXIT_NO_DAEMON, EXIT_NO_JOB, EXIT_INTERRUPTED = 1, 2, 4, 10, 11, 130
EXIT_OF_HEALTH = {Health.OK: 0, Health.WARN: 3, Health.ERR: 4}
WATCH_S = 1.0
COLOURS = {"OK": "green", "WARN": "yellow", "ERR": "red"}

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, and nothing else.")
daemon_option = click.option(
    "--daemon", metavar="unix:PATH", help="A daemon of this node; default: REFT_DAEMON, else this user's own."
)


class Verbs(click.Group):
    """Says what is wrong with a command line as JSON too, where that was asked for."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if isinstance(
            sys.stdout, io.TextIOWrapper
        ):  # what a terminal of another encoding lacks must not end a recovery
            sys.stdout.reconfigure(errors="replace")
        as_json = "--json" in args
        with misused(as_json):
            context = super().make_context(info_name, args, parent, **extra)
        context.obj = as_json
        if not allows_colour():
            context.color = False
        return context

    def invoke(self, ctx: click.Context) -> Any:
        with misused(ctx.obj):
            return super().invoke(ctx)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Looks at the training state that reft holds in memory.

    Exit codes: 0 as asked, 1 failed, 2 wrong usage, 3 WARN and 4 ERR (with --check), 10 no daemon, 11 no such job,
    129, 130 and 143: SIGHUP, Ctrl-C, SIGTERM. 4 too if --what-if finds a loss, or recover nothing that can be restored.
    """


@main.command()
@json_option
@click.option("--watch", is_flag=True, help="Refresh every second, until Ctrl-C.")
@click.option("--check", is_flag=True, help="Exit with 3 if any job's health is WARN, with 4 if it is ERR.")
@click.option("--what-if", "question", metavar="lose=NODE[,NODE]", help="Would it survive this? Nodes, or domains.")
@click.option("--job", metavar="NAME", default="", help="This job only.")
@daemon_option
def status(as_json: bool, watch: bool, check: bool, question: str | None, job: str, daemon: str | None) -> None:
    """Shows what is held for each job, how it is protected, and which loss it survives.

    --what-if answers for the newest whole step: exit 0 if it survives, 4 if it does not.
    """
    with failing(as_json):
        if watch and (as_json or check or question is not None):
            raise ConfigError(
                "--watch goes with neither --json, --check nor --what-if: they ask once.", "leave one out"
            )
        if check and question is not None:
            raise ConfigError(
                "--check and --what-if each have an exit code of their own to give.", "ask one after the other"
            )
        address = local_address(daemon)
        request = pb.StatusRequest(job=job, deep=True)
        if watch:
            _watch(address, request)
        reply = ask(address, "Status", request)
        if question is not None:
            _what_if(reply, address, question, as_json)
        found = surveys(address, reply)
    jobs = [status_view.job_view(each, found.get(each.job)) for each in reply.jobs]
    if as_json:
        click.echo(json.dumps(status_view.document(reply, jobs, address), indent=2))
    else:
        for line in status_text.status_lines(reply, jobs):
            click.echo(coloured(line))
    if check:
        sys.exit(EXIT_OF_HEALTH[status_view.worst(jobs)])


@main.command()
@click.argument("job")
@click.option("--yes", is_flag=True, help="Do it; else only the plan is shown.")
@click.option("--onto", "onto", multiple=True, metavar="NODE=ADDR", help="The daemon that takes a lost node's place.")
@json_option
@daemon_option
def recover(job: str, yes: bool, onto: tuple[str, ...], as_json: bool, daemon: str | None) -> None:
    """Shows what of JOB is lost with its nodes and how it comes back; with --yes rebuilds it on replacements.

    All trainers must have ended. A restart of the job finds lost nodes by itself: this makes their slots anew before it.
    Run it on a living node that holds the job, and name the daemon of each replacement with --onto NODE=HOST:PORT.
    """
    with failing(as_json):
        run = RecoverCommand(local_address(daemon), job, pairs_of(onto), replacement_here(daemon))
        view = run.rebuild(lambda text: None if as_json else click.echo(text)) if yes else run.look()[0]
    code = EXIT_LOST if view.outcome == "unrecoverable" else 0
    if as_json:
        document = {"schema_version": status_view.SCHEMA_VERSION, **recover_view.document(view, code, run.rebuilt)}
        click.echo(json.dumps(document, indent=2))
        sys.exit(code)
    for line in recover_view.recovery_lines(view):
        click.echo(coloured(line))
    if view.outcome == "recoverable":
        click.echo("Nothing was changed. With --yes the slots are made again.")
    sys.exit(code)


@main.command()
@click.argument("job")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@daemon_option
def purge(job: str, yes: bool, as_json: bool, daemon: str | None) -> None:
    """Frees what this node's daemon holds of JOB. Its snapshots are gone then; it must not be training."""
    with failing(as_json):
        address = local_address(daemon)
        reply = ask(address, "Status", pb.StatusRequest(job=job, deep=True))
        held = status_view.job_view(reply.jobs[0])
        others = [node.node for node in held.nodes if node.node != reply.node]
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise ConfigError("there is nobody to ask.", "give --yes")
            step = "nothing whole" if held.whole is None else f"step {held.whole}"
            _ask_to(f"Free {step} of job {job} on {reply.node}?")
        freed = ask(address, "Purge", pb.PurgeRequest(job=job)).freed_bytes
    if as_json:
        result = {"job": job, "node": reply.node, "freed_bytes": freed, "other_nodes": others}
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result}, indent=2))
        return
    click.echo(f"job {job}: freed {size(freed)} on {reply.node}.")
    if others:
        click.echo(f"It may still be held on {', '.join(others)}: run this there too.")


@main.command()
@click.argument("job")
@click.option("--rank", type=int, help="Of this rank only; else of all that train on this node.")
@click.option(
    "--output", default="reft-timeline.json", show_default=True, metavar="PATH", type=click.Path(path_type=Path)
)
@json_option
@daemon_option
def timeline(job: str, rank: int | None, output: Path, as_json: bool, daemon: str | None) -> None:
    """Writes what JOB's trainers on this node did in their last steps, as a trace for ui.perfetto.dev.

    It shows compute, waits, each copied chunk with its tier, parity, the fence and the stall at it.
    """
    with failing(as_json):
        found = collect(local_address(daemon), job, rank)
        write(found.trace, output)
    if as_json:
        silent = {str(number): why for number, why in found.silent.items()}
        events = len(found.trace["traceEvents"])
        result = {"job": job, "path": str(output), "ranks": list(found.ranks), "events": events, "silent": silent}
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result}, indent=2))
        return
    for number, why in found.silent.items():
        click.echo(f"rank {number} is missing: {why}", err=True)
    click.echo(
        f"{output}: {counted(len(found.ranks), 'rank')} of job {job}. Open it in ui.perfetto.dev or chrome://tracing."
    )


@main.command()
@json_option
@click.option("--steps", default=48, show_default=True, type=click.IntRange(min=24), help="Steps to train, twice.")
@click.option("--keep-logs", is_flag=True, help="Keep the folder with the logs and records, and say where it is.")
def demo(as_json: bool, steps: int, keep_logs: bool) -> None:
    """Trains on two pretend nodes, kills trainers, and proves that nothing was lost. About a minute; needs no GPU."""
    from reft.cli.demo.run import demonstrate  # asks for nothing that the other verbs need

    with failing(as_json):
        result = demonstrate(steps, keep_logs, as_json)
    if as_json:
        click.echo(json.dumps(result.document(), indent=2))
    sys.exit(0 if result.passed else EXIT_FAILED)


def pairs_of(given: Iterable[str]) -> dict[str, str]:
    """NODE=ADDR, as a person types it.

    Raises:
        ConfigError: it is none, or a node is named twice.
    """
    found: dict[str, str] = {}
    for each in given:
        node, _, address = each.partition("=")
        if not node or not address or node in found:
            raise ConfigError(
                f"--onto {each!r} names no node, no address, or a node twice.",
                "--onto NODE=unix:PATH or NODE=host:port",
            )
        found[node] = rpc.check_address(address)
    return found


def _ask_to(do: str) -> None:
    """Returns if the person says yes.

    Raises:
        Abort: any other answer; exit code 1. Ctrl-C is one of its own, which click's own question does not tell apart.
    """
    click.echo(f"{do} [y/N]: ", nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise click.Abort


def _what_if(reply: pb.StatusReply, address: str, question: str, as_json: bool) -> NoReturn:
    """Answers for the only job.

    Raises:
        ConfigError: there is not one job, or a node is not known.
    """
    word, _, names = question.partition("=")
    lose = sorted({name for name in names.split(",") if name})
    if word != "lose" or not lose:
        raise ConfigError(f"--what-if {question!r} can't be read.", "--what-if lose=NODE or lose=NODE,NODE")
    if len(reply.jobs) != 1:
        raise ConfigError(f"{len(reply.jobs)} jobs are held here; the question is about one.", "give --job NAME")
    job = reply.jobs[0].job
    job_survey = steady(address, reply.jobs[0])
    judged = job_survey.protection()
    nodes = {unit: job_survey.inventory.nodes_of(unit) for unit in lose}
    unknown = [unit for unit, found in nodes.items() if not found]
    if unknown:
        known = sorted({*job_survey.names.values(), *(node.domain for node in job_survey.nodes.values())} - {""})
        raise ConfigError(f"no node or failure domain {unknown[0]} in job {job}.", f"one of {', '.join(known)}")
    loss_analysis = judged[1] if judged else None
    version = judged[0].version if judged else None
    loss = loss_analysis.what_if({node for found in nodes.values() for node in found}) if loss_analysis else None
    if as_json:
        document = status_view.what_if_document(job, lose, version, loss)
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **document}, indent=2))
    else:
        click.echo("\n".join(status_text.what_if_lines(job, lose, version, loss)))
    sys.exit(EXIT_LOST if loss or version is None else 0)


def _watch(address: str, request: pb.StatusRequest) -> NoReturn:
    """Shows the status every second until Ctrl-C. A daemon that does not answer is shown too: it may come back."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:  # on which rich's Live shows nothing at all
        while True:
            click.echo("\n".join([*_lines_now(address, request), ""]))
            sys.stdout.flush()
            time.sleep(WATCH_S)
    with unwinding(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update("\n".join(marked(line) for line in _lines_now(address, request)), refresh=True)
            time.sleep(WATCH_S)


def _lines_now(address: str, request: pb.StatusRequest) -> list[str]:
    try:
        reply = ask(address, "Status", request)
    except (DaemonUnavailable, UnknownJob) as error:
        return status_text.wrapped("", str(error))
    found = surveys(address, reply)
    return status_text.status_lines(reply, [status_view.job_view(each, found.get(each.job)) for each in reply.jobs])


def health_in(line: str) -> str:
    """The word of health that a line gives, or nothing."""
    label, _, rest = line.partition("  ")
    word = rest.split(maxsplit=1)[0] if rest.split() else ""
    return word if label == "health" and word in COLOURS else ""


def coloured(line: str) -> str:
    """The line with its word of health in colour; click takes the colour away where stdout is no terminal."""
    word = health_in(line)
    return line.replace(word, click.style(word, fg=COLOURS[word], bold=True), 1) if word else line


def marked(line: str) -> str:
    """The same for rich's markup."""
    from rich.markup import escape

    word = health_in(line)
    text = escape(line)
    return text.replace(word, f"[bold {COLOURS[word]}]{word}[/]", 1) if word else text


@contextmanager
def misused(as_json: bool) -> Iterator[None]:
    """Says click's errors as JSON if that was asked for, and in a line what can't be written, as to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader is gone, such as head: click ends without a word
            raise
        text = f"the answer can't be written: {error}."
        _say_error(text, "", EXIT_FAILED) if as_json else click.echo(f"reft-cli: {text}", err=True)
        # What stays in Python's buffer is written when it ends, and would end it with 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except click.UsageError as error:
        if not as_json:
            raise
        hint = f"{error.ctx.command_path} --help" if error.ctx else ""
        _say_error(error.format_message(), hint, error.exit_code)
        sys.exit(error.exit_code)


def _say_error(message: str, hint: str, code: int) -> None:
    fields: dict[str, Any] = {"message": message, "hint": hint, "exit_code": code}
    click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, "error": fields}), err=True)


@contextmanager
def failing(as_json: bool) -> Iterator[None]:
    """Turns errors into exit codes and one message on stderr."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except ReftError as error:
        code = exit_code(error)
        if as_json:
            _say_error(error.message, error.hint, code)
        else:
            click.echo(f"reft-cli: {error}", err=True)
        sys.exit(code)


def exit_code(error: ReftError) -> int:
    """The exit code that an error ends with."""
    if isinstance(error, UnknownJob):
        return EXIT_NO_JOB
    if isinstance(error, DaemonUnavailable):
        return EXIT_NO_DAEMON
    # A value that the daemon refuses is a failure; a value that can't even be sent is wrong usage.
    refused = isinstance(error.__cause__, grpc.RpcError)
    return EXIT_USAGE if isinstance(error, ConfigError) and not refused else EXIT_FAILED


if __name__ == "__main__":
    main()
