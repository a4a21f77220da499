"""`reft-cli`: status, recover, persist, list, verify, purge, timeline, demo, rehearse: exit codes.

0 done   1 failed   2 wrong usage, or not deterministic (rehearse)   3 WARN (with --check)
4 ERR (with --check), not survived (--what-if), or not recoverable (recover)
10 no daemon   11 no such job   129 terminal closed   130 Ctrl-C   143 SIGTERM
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
from reft.cli import recover_view, status_text, status_view, storage
from reft.cli.ask import NoSuchJob, ask, local_address
from reft.cli.export.casts import NAMES
from reft.cli.export.command import ExportCommand, report_lines
from reft.cli.export.start import export_source, is_terminal, progress
from reft.cli.go_back import GoBackCommand
from reft.cli.persist import persist_job, progress_text
from reft.cli.purge_all import purge_all_command
from reft.cli.recover import RecoverCommand, pairs_of, replacement_here
from reft.cli.signals import unwinding
from reft.cli.survey import steady, surveys
from reft.cli.timeline import collect, write
from reft.config import allows_colour, parse_size
from reft.core.budget import format_bytes
from reft.core.recovery.holdings import replayed
from reft.core.status.health import Health
from reft.core.text import counted
from reft.errors import ConfigError, DaemonUnavailable, ReftError
from reft.wire.v1 import daemon_pb2 as pb

EXIT_FAILED, EXIT_USAGE, EXIT_LOST, EXIT_NO_DAEMON, EXIT_NO_JOB, EXIT_INTERRUPTED = 1, 2, 4, 10, 11, 130
EXIT_OF_HEALTH = {Health.OK: 0, Health.WARN: 3, Health.ERR: 4}
WATCH_S = 1.0
COLOURS = {"OK": "green", "WARN": "yellow", "ERR": "red"}


def _named(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuses an empty name: to a daemon it means all jobs."""
    if not value:
        raise click.BadParameter("it is empty; reft-cli status lists the jobs.", context, parameter)
    return value


job_argument = click.argument("job", callback=_named)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else."
)
key_option = click.option(
    "--persist-key-file",
    type=click.Path(path_type=Path),
    envvar="REFT_PERSIST_KEY_FILE",
    help="The key of the daemons that wrote: a checkpoint without the right MAC counts as damaged.",
)
daemon_option = click.option(
    "--daemon", metavar="unix:PATH", help="The daemon to ask, on this node. Default: REFT_DAEMON, else your own daemon."
)


class Verbs(click.Group):
    """Reports wrong command lines as JSON too, if --json was given."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # A character that the terminal's encoding lacks must not end a recovery.
        if isinstance(sys.stdout, io.TextIOWrapper):
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
    """Shows, recovers and frees the training state that reft holds in memory.

    Run reft-cli on a node of the job. Begin with "reft-cli status".

    \b
    Exit codes:
      0    done
      1    failed
           rehearse: the run does not go on bit for bit
      2    wrong usage
           rehearse: the script is not deterministic by itself
      3    status --check: the health of a job is WARN
      4    status --check: the health of a job is ERR
           status --what-if: the state would be lost
           recover: no step can be restored
      10   no daemon answers
      11   no such job
      129  SIGHUP: the terminal was closed
      130  Ctrl-C
      143  SIGTERM
    """


@main.command()
@click.argument("job", required=False, default="")
@click.option("--all", "show_all", is_flag=True, help="Show all lines of each job, also of those that are over.")
@json_option
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
@click.option("--check", is_flag=True, help="Exit with 3 if the worst health is WARN, with 4 if ERR.")
@click.option(
    "--what-if",
    "question",
    metavar="lose=NODE[,NODE]",
    help="Would the job survive the loss of these nodes or failure domains?",
)
@click.option("--job", "named", metavar="NAME", default="", help="The same as JOB.")
@daemon_option
def status(
    job: str, show_all: bool, as_json: bool, watch: bool, check: bool, question: str | None, named: str, daemon: str | None
) -> None:  # fmt: skip
    """Shows the health of each job, and which losses the job survives.

    Jobs that train come first, in ten lines at most. A job that is over takes one line. With JOB,
    --all or --watch all lines are shown. --json always has all facts.

    \b
    Health:      OK, WARN or ERR, with the reason
    Protection:  PROTECTED    as many failure domains can be lost as planned
                 DEGRADED     fewer can be lost now: a node is missing, or the
                              first step after a restore is not whole yet
                 UNPROTECTED  the job is not set up to survive the loss of a
                              failure domain
                 LOCAL        the job has one node: it survives lost
                              processes, and a lost node if a checkpoint is
                              on storage
    A job is over if no trainer lives: it ended, or it failed, which is a
    trainer that did not close its session. KEPT FOR is how long this node
    keeps its slots yet.

    --what-if asks about the newest step that can be restored. Exit code 0: that step survives, or
    an older one to which the job goes back. Exit code 4: no step survives.
    """
    with failing(as_json):
        if watch and (as_json or check or question is not None):
            raise ConfigError(
                "--watch can't be combined with --json, --check or --what-if: they ask only once.", "use one of them"
            )
        if check and question is not None:
            raise ConfigError(
                "--check and --what-if can't be combined: each sets the exit code.", "run them one after the other"
            )
        if job and named and job != named:
            raise ConfigError(f"JOB is {job!r}, and --job is {named!r}.", "name the job once")
        job = job or named
        address = local_address(daemon)
        request = pb.StatusRequest(job=job, deep=True)
        if watch:
            _watch(address, request)
        reply = ask(address, "Status", request)
        if question is not None:
            _what_if(reply, address, question, as_json)
        surveys_by_job = surveys(address, reply)
    jobs = [status_view.job_view(each, surveys_by_job.get(each.job)) for each in reply.jobs]
    if as_json:
        click.echo(json.dumps(status_view.document(reply, jobs, address), indent=2))
    else:
        lines = status_text.status_lines if job or show_all else status_text.brief_lines
        for line in lines(reply, jobs):
            click.echo(coloured(line))
    if check:
        sys.exit(EXIT_OF_HEALTH[status_view.worst(jobs, reply.damaged)])


@main.command()
@job_argument
@click.option("--yes", is_flag=True, help="Rebuild the lost slots. Without --yes only the plan is shown.")
@click.option(
    "--onto",
    "onto",
    multiple=True,
    metavar="NODE=ADDR",
    help="The daemon that replaces a lost node. Repeat for each lost node.",
)
@click.option("--step", type=click.IntRange(min=0), help="Go back to this step, on purpose. Newer steps count no more.")
@json_option
@daemon_option
def recover(job: str, yes: bool, onto: tuple[str, ...], step: int | None, as_json: bool, daemon: str | None) -> None:
    """Shows the losses of JOB, and rebuilds them with --yes.

    End all trainers of JOB first. A plain restart of JOB does not need this command: it finds lost
    nodes by itself. This command rebuilds the lost slots before the restart.

    \b
    1. On a living node that holds JOB, look at the plan:
         reft-cli recover JOB
    2. On each replacement node, start a daemon that other nodes can reach:
         reft-daemon --listen HOST:PORT
    3. Rebuild, and name the replacement of each lost node:
         reft-cli recover JOB --yes --onto NODE=HOST:PORT
    4. Start JOB again.

    With --step, and --yes, the next start of JOB begins from that step, from memory or storage, for
    example after a loss spike. This can't be undone.

    Exit code 4: no step can be restored.
    """
    with failing(as_json):
        if step is not None:
            if onto:
                raise ConfigError("--step and --onto can't be combined.", "go back first, then rebuild")
            _go_back(GoBackCommand(local_address(daemon), job, step), yes, as_json)
            return
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
        click.echo("Nothing was changed. Add --yes to rebuild the lost slots.")
    sys.exit(code)


@main.command()
@job_argument
@json_option
@daemon_option
def persist(job: str, as_json: bool, daemon: str | None) -> None:
    """Writes a checkpoint of JOB to storage now, and waits until it is complete.

    Run it on any node of JOB. The checkpoint has the newest protected step, or the newest whole one
    if nothing is exchanged. JOB trains on meanwhile. Ctrl-C ends the waiting, not the checkpoint.
    """
    show_bar = not as_json and is_terminal(sys.stderr)

    def show(storage: pb.StorageStatus) -> None:
        if show_bar:
            click.echo(f"\r\x1b[K{progress_text(storage)}", err=True, nl=False)

    with failing(as_json):
        try:
            reply = persist_job(local_address(daemon), job, show)
        finally:
            if show_bar:
                click.echo("\r\x1b[K", err=True, nl=False)
    storage = reply.storage
    if as_json:
        result = {"job": job, "step": storage.persisted, "bytes": storage.nbytes, "took_s": round(storage.took_s, 3)}
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result}, indent=2))
        return
    click.echo(f"job {job}: step {storage.persisted} is on storage.")


@main.command()
@click.argument("job", required=False, default="")
@click.option("--all", "all_jobs", is_flag=True, help="Leave nothing on this node: jobs, daemon, folders and logs.")
@click.option("--yes", is_flag=True, help="Free the memory without asking.")
@json_option
@daemon_option
def purge(job: str, all_jobs: bool, yes: bool, as_json: bool, daemon: str | None) -> None:
    """Frees everything that this node's daemon holds of JOB.

    The snapshots of JOB on this node are lost. JOB must not be training. Run it on every node of
    JOB. Checkpoints on storage stay, but the next start of JOB does not begin from them.

    With --all, all jobs of the daemon are freed, the daemon is ended if attach started it, and its
    folders and logs are removed. That works without a running daemon, too.
    """
    with failing(as_json):
        if bool(job) is all_jobs:
            raise ConfigError("purge needs JOB or --all, and not both.", "reft-cli purge JOB, or reft-cli purge --all")
        address = local_address(daemon)
        if all_jobs:
            _purge_all(address, yes, as_json)
            return
        reply = ask(address, "Status", pb.StatusRequest(job=job, deep=True))
        others, step = [], "its record is damaged"
        if not reply.damaged:
            view = status_view.job_view(reply.jobs[0], surveys(address, reply).get(job))
            others = status_view.other_nodes(reply, (node.node for node in view.nodes))
            step = "no whole step" if view.whole is None else f"step {view.whole}"
        if not yes:
            _confirm(f"Free the memory of job {job} on {reply.node} ({step})?", as_json)
        freed = ask(address, "Purge", pb.PurgeRequest(job=job), storage.STORED_S).freed_bytes
    if as_json:
        result = {"job": job, "node": reply.node, "freed_bytes": freed, "other_nodes": others}
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result}, indent=2))
        return
    click.echo(f"job {job}: freed {format_bytes(freed)} on {reply.node}.")
    if others:
        _echo_lines([f"Other nodes may still hold the job: run this command on {', '.join(others)} too."])


@main.command()
@job_argument
@click.option("--rank", type=int, help="Trace only this rank. Default: all ranks that train on this node.")
@click.option(
    "--output",
    default="reft-timeline.json",
    show_default=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="The file to write.",
)
@json_option
@daemon_option
def timeline(job: str, rank: int | None, output: Path, as_json: bool, daemon: str | None) -> None:
    """Writes a trace of JOB's last steps, for ui.perfetto.dev.

    The trace shows the ranks on this node: compute, waits, each copied chunk with its tier, parity,
    the fence, and the stall at the fence.
    """
    with failing(as_json):
        traces = collect(local_address(daemon), job, rank)
        write(traces.trace, output)
    if as_json:
        silent = {str(number): why for number, why in traces.silent.items()}
        events = len(traces.trace["traceEvents"])
        result = {"job": job, "path": str(output), "ranks": list(traces.ranks), "events": events, "silent": silent}
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result}, indent=2))
        return
    for number, why in traces.silent.items():
        click.echo(f"rank {number} is missing: {why}", err=True)
    click.echo(
        f"{output}: {counted(len(traces.ranks), 'rank')} of job {job}. Open it in ui.perfetto.dev or chrome://tracing."
    )


@main.command()
@json_option
@click.option(
    "--steps", default=48, show_default=True, type=click.IntRange(min=24), help="Steps of each of the two trainings."
)
@click.option("--keep-logs", is_flag=True, help="Keep the folder with logs and records, and print its path.")
def demo(as_json: bool, steps: int, keep_logs: bool) -> None:
    """Kills trainers on this computer and proves that nothing is lost.

    Two pretend nodes train the same steps twice: once with two SIGKILLs, once without. Then every
    bit is compared. The demo takes about a minute and needs no GPU.
    """
    from reft.cli.demo.run import demonstrate  # only this verb needs the import

    with failing(as_json):
        result = demonstrate(steps, keep_logs, as_json)
    if as_json:
        click.echo(json.dumps(result.document(), indent=2))
    sys.exit(0 if result.passed else EXIT_FAILED)


@main.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Tries whether your own script goes on bit for bit after a kill.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--steps", default=30, show_default=True, type=click.IntRange(min=4), help="Steps to compare.")
@click.option(
    "--kill", default="rank", show_default=True, type=click.Choice(["rank", "all", "daemon"]),
    help="SIGKILL one rank; or all ranks and their launcher; or the daemon, then a rank.",
)  # fmt: skip
@click.option(
    "--cwd", "folder", metavar="DIR", type=click.Path(path_type=Path),
    help="Run in the fresh folders DIR/a and DIR/b.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", default=600.0, show_default=True, metavar="S", type=click.FloatRange(min=1.0),
    help="Seconds for each of the two runs.",
)  # fmt: skip
@json_option
def rehearse(
    command: tuple[str, ...], steps: int, kill: str, folder: Path | None, timeout_s: float, as_json: bool
) -> None:
    """Tries whether COMMAND, your own training, goes on bit for bit after a kill.

    COMMAND runs twice on this host: once undisturbed, once with a SIGKILL in the middle. Then each
    step is compared: inputs of the model, random generators, parameter groups, state=, and every
    tensor. The first difference is named, with its likely cause and the remedy.

    \b
      reft-cli rehearse -- torchrun --nproc-per-node=2 --max-restarts=3 train.py
      reft-cli rehearse --kill all -- python train.py

    Both runs end after --steps steps, by SIGKILL. Each has a daemon of its own, and leaves nothing
    in memory. A command that ends by the kill is started again. The script may read
    REFT_REHEARSAL=1, and writes its own outputs twice: --cwd gives each run a fresh folder, where
    relative paths that the script opens begin.

    \b
    Exit codes:
      0   bit-equal after the kill
      1   different, or state was forgotten: the likely cause is named
          a run failed: its log is shown
      2   the runs differ before the kill: not deterministic by itself
    """
    from reft.cli.rehearse.verb import run_verb  # only this verb needs the import

    with failing(as_json):
        code = run_verb(command, steps, kill, folder, timeout_s, as_json)
    sys.exit(code)


@main.command("list")
@click.argument("what", metavar="JOB|DIR|URL", callback=_named)
@key_option
@json_option
@daemon_option
def list_held(what: str, persist_key_file: Path | None, as_json: bool, daemon: str | None) -> None:
    """Lists the steps that memory and storage hold, the newest first.

    JOB asks this node's daemon: memory of all nodes of JOB, and its storage. DIR (with a slash) or
    URL (s3://…) is read without a daemon: all jobs there.
    """
    with failing(as_json), unwinding():
        rows = (
            storage.rows_of_folder(storage.root_of(what), persist_key_file)
            if "/" in what
            else {what: storage.rows_of_job(local_address(daemon), what)}
        )
    if as_json:
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, "jobs": storage.document(rows)}, indent=2))
        return
    for job, each in rows.items():
        _echo_lines(storage.lines_of(job, each))
    if not rows:
        click.echo(f"{what} holds no job.")


@main.command()
@click.argument("what", metavar="JOB|DIR/JOB|URL/JOB", callback=_named)
@click.option(
    "--to", "path", required=True, metavar="PATH", type=click.Path(path_type=Path), help="The folder to make."
)
@click.option(
    "--format", "form", default="safetensors", show_default=True, type=click.Choice(["safetensors", "dcp"]),
    help="dcp has a pickle, .metadata, as torch writes it.",
)  # fmt: skip
@click.option("--only", type=click.Choice(["weights"]), help="Leave out optimizer state.")
@click.option("--dtype", type=click.Choice(sorted(NAMES)), help="Cast floating point weights.")
@click.option("--step", type=click.IntRange(min=0), help="Default: the newest step.")
@click.option("--lineage", default="", help="Of DIR/JOB or URL/JOB, if there are several.")
@click.option("--max-shard", default="5GB", show_default=True, help="The most bytes of a safetensors file.")
@key_option
@json_option
@daemon_option
def export(
    what: str, path: Path, form: str, only: str | None, dtype: str | None, step: int | None, lineage: str, max_shard: str,
    persist_key_file: Path | None, as_json: bool, daemon: str | None,
) -> None:  # fmt: skip
    """Writes a step of JOB as files that need no reft.

    JOB is read from the memory of its nodes, while it trains too. DIR/JOB (with a slash) or
    s3://…/JOB is read from what --persist names, without a daemon. Weights have the names of the
    model's state dict, whole, whatever the sharding. PATH appears when all is on the disk.

    \b
    safetensors   model.safetensors, or several files with an index;
                  optimizer.safetensors beside it
    dcp           torch.distributed.checkpoint.load: model.NAME, optimizer.NAME
    """
    with failing(as_json), unwinding(), progress(as_json) as show:
        shard_bytes = parse_size(max_shard)
        if not shard_bytes:
            raise ConfigError(f"--max-shard is {max_shard}; a file holds at least one byte.", "--max-shard 5GB")
        newest = -1 if step is None else step
        with export_source(what, lambda: local_address(daemon), newest, lineage, persist_key_file) as source:
            report = ExportCommand(
                source, path.absolute(), form == "dcp", only is None, NAMES[dtype] if dtype else "", shard_bytes, show
            ).run()
    if as_json:
        result = {
            "path": str(path), "step": report.version.step, "epoch": report.version.epoch.counter,
            "tensors": report.tensors, "bytes": report.nbytes, "notes": report.notes,
        }  # fmt: skip
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result}, indent=2))
        return
    _echo_lines(report_lines(report, path, format_bytes(report.nbytes)))


@main.command()
@click.argument("root", metavar="DIR|URL")
@click.argument("job", required=False, default="")
@key_option
@json_option
def verify(root: str, job: str, persist_key_file: Path | None, as_json: bool) -> None:
    """Reads every byte of the checkpoints in DIR, and compares them with their digests.

    DIR or URL is what reft-daemon --persist names. With JOB, only that job's checkpoints are read.

    \b
    Exit code 1: a checkpoint is damaged.   11: DIR has no checkpoint of JOB.
    """
    results = []
    with failing(as_json), unwinding():
        root = storage.root_of(root)
        for answer in storage.audit("verify", root, job, key_file=persist_key_file):
            if "sound" in answer:
                results.append(answer)
                if not as_json:
                    words = "sound" if answer["sound"] else f"DAMAGED: {answer['damage']}"
                    _echo_lines([f"job {answer['job']}  lineage {answer['lineage']}  {answer['name']}  {words}"])
            elif not as_json and is_terminal(sys.stderr):
                done = f"{format_bytes(answer['done_bytes'])} of {format_bytes(answer['total_bytes'])}"
                click.echo(f"\r{answer['name']}  {done}   \r", err=True, nl=False)
        if job and not results:
            raise NoSuchJob(f"{root} has no checkpoint of job {job!r}.", f"reft-cli list {root}")
    damaged = sum(not each["sound"] for each in results)
    if as_json:
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, "checkpoints": results}, indent=2))
    else:
        click.echo(f"{counted(len(results), 'checkpoint')} read, {damaged} damaged.")
    sys.exit(EXIT_FAILED if damaged else 0)


def _go_back(command: GoBackCommand, yes: bool, as_json: bool) -> None:
    """Goes back to a step with --yes; else only says what would be."""
    base, newer = command.base, command.newer()
    nodes = command.run() if yes else []
    if as_json:
        result = {
            "job": command.job, "step": base.step, "epoch": base.epoch.counter, "done": yes, "nodes": nodes,
            "in_memory": base in command.in_memory, "on_storage": base in command.on_storage,
            "given_up": [each.step for each in newer],
        }  # fmt: skip
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result}, indent=2))
        return
    where = "memory" if base in command.in_memory else "storage"
    given_up = f" {counted(len(newer), 'newer step')} (up to step {newer[0].step}) count no more." if newer else ""
    if yes:
        click.echo(f"job {command.job}: the next start begins from {base}, from {where}.{given_up}")
    else:
        click.echo(f"job {command.job} can go back to {base}, from {where}.{given_up}")
        click.echo("Nothing was changed. Add --yes to go back.")


def _purge_all(address: str, yes: bool, as_json: bool) -> None:
    """Frees all jobs of the daemon, and removes what it would leave on this node."""
    command = purge_all_command(address)
    reply = command.look()
    if not yes:
        jobs = [job.job for job in reply.jobs] + [damaged.job for damaged in reply.damaged] if reply else []
        which = f" ({', '.join(jobs)})" if jobs else ""
        _confirm(f"Free {counted(len(jobs), 'job')}{which}, and remove reft's files on this node?", as_json)
    result = command.run()
    if as_json:
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **result.document()}, indent=2))
    else:
        _echo_lines(result.lines())


def _echo_lines(lines: Iterable[str]) -> None:
    """Prints lines with words of others, such as files on storage: they forge no line."""
    for line in lines:
        click.echo(status_text.safe(line))


def _confirm(question: str, as_json: bool) -> None:
    """Returns if the user answers yes.

    click's own prompt is not used: it can't tell Ctrl-C, which has an exit code of its own, from
    "no".

    Raises:
        Abort: any other answer; exit code 1.
        ConfigError: nobody can be asked.
    """
    if as_json or not is_terminal(sys.stdin):
        raise ConfigError("purge can't ask for confirmation: stdin is no terminal, or --json was given.", "add --yes")
    click.echo(f"{question} [y/N]: ", nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise click.Abort


def _what_if(reply: pb.StatusReply, address: str, question: str, as_json: bool) -> NoReturn:
    """Prints whether the only job survives a loss, and exits.

    Raises:
        ConfigError: there is not exactly one job, or a node is unknown.
    """
    keyword, _, names = question.partition("=")
    lose = sorted({name for name in names.split(",") if name})
    if keyword != "lose" or not lose:
        raise ConfigError(f"--what-if {question!r} can't be read.", "--what-if lose=NODE or --what-if lose=NODE,NODE")
    if len(reply.jobs) != 1:
        raise ConfigError(
            f"--what-if needs one job, and this daemon holds {len(reply.jobs)}.", "reft-cli status JOB --what-if …"
        )
    job = reply.jobs[0].job
    job_survey = steady(address, reply.jobs[0])
    judged = job_survey.protection()
    nodes_by_unit = {unit: job_survey.inventory.nodes_of(unit) for unit in lose}
    unknown = [unit for unit, nodes in nodes_by_unit.items() if not nodes]
    if unknown:
        known = sorted({*job_survey.names.values(), *(node.domain for node in job_survey.nodes.values())} - {""})
        raise ConfigError(f"job {job} has no node or failure domain {unknown[0]}.", f"one of {', '.join(known)}")
    loss_analysis = judged[1] if judged else None
    version = judged[0].newest if judged else None
    lost_nodes = {node for nodes in nodes_by_unit.values() for node in nodes}
    loss = loss_analysis.what_if(lost_nodes) if loss_analysis else None
    plan = job_survey.plan_without(lost_nodes)
    after = plan.base if version else None
    if as_json:
        document = status_view.what_if_document(job, lose, version, after, loss)
        click.echo(json.dumps({"schema_version": status_view.SCHEMA_VERSION, **document}, indent=2))
    else:
        click.echo(
            "\n".join(
                status_text.what_if_lines(job, lose, version, after, loss, replayed(plan) if plan.replays else "")
            )
        )
    sys.exit(EXIT_LOST if after is None else 0)


def _watch(address: str, request: pb.StatusRequest) -> NoReturn:
    """Shows the status every second until Ctrl-C.

    A daemon that does not answer is shown too, because the daemon may come back.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    # On such a terminal rich's Live shows nothing.
    if not console.is_terminal or console.is_dumb_terminal:
        while True:
            click.echo("\n".join([*_lines_now(address, request), ""]))
            time.sleep(WATCH_S)
    with unwinding(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update("\n".join(marked(line) for line in _lines_now(address, request)), refresh=True)
            time.sleep(WATCH_S)


def _lines_now(address: str, request: pb.StatusRequest) -> list[str]:
    try:
        reply = ask(address, "Status", request)
    except (DaemonUnavailable, NoSuchJob) as error:
        return status_text.wrapped("", str(error))
    surveys_by_job = surveys(address, reply)
    views = [status_view.job_view(each, surveys_by_job.get(each.job)) for each in reply.jobs]
    return [status_text.safe(line) for line in status_text.status_lines(reply, views)]


def health_in(line: str) -> str:
    """Returns the word of health in a "health" line; empty for other lines."""
    label, _, rest = line.partition("  ")
    word = rest.split(maxsplit=1)[0] if rest.split() else ""
    return word if label == "health" and word in COLOURS else ""


def coloured(line: str) -> str:
    """Returns the line with its word of health coloured; click drops colour without a terminal.

    Names and reasons in the line come from other nodes: characters of control are escaped.
    """
    line, word = status_text.safe(line), health_in(line)
    return line.replace(word, click.style(word, fg=COLOURS[word], bold=True), 1) if word else line


def marked(line: str) -> str:
    """Returns the line in rich's markup, with a coloured word of health."""
    from rich import markup

    word = health_in(line)
    text = markup.escape(line)
    return text.replace(word, f"[bold {COLOURS[word]}]{word}[/]", 1) if word else text


@contextmanager
def misused(as_json: bool) -> Iterator[None]:
    """Reports usage errors as JSON if --json was given, and write errors in one line.

    A write error is, for example, a full disk. Ctrl-C has its own exit code, also while views are
    made and printed; click would exit with that of a failure.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader, for example head, has ended: click exits without a message
            raise
        text = f"the output can't be written: {error}." if error.filename is None else f"{error}."
        _say_error(text, "", EXIT_FAILED) if as_json else click.echo(f"reft-cli: {text}", err=True)
        # Python writes its buffer again at exit. That would fail too, with exit code 120.
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
    """Turns errors into an exit code and one message on stderr."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except UnicodeEncodeError as error:  # a word of the command line; no message and no path can carry it
        _say_failure(ConfigError(f"{error.object!r} has bytes that are no UTF-8.", "write the name in UTF-8"), as_json)
    except ReftError as error:
        _say_failure(error, as_json)


def _say_failure(error: ReftError, as_json: bool) -> NoReturn:
    code = exit_code(error)
    if as_json:
        _say_error(error.message, error.hint, code)
    else:
        click.echo(f"reft-cli: {status_text.safe_lines(str(error))}", err=True)
    sys.exit(code)


def exit_code(error: ReftError) -> int:
    """Returns the exit code for an error."""
    if isinstance(error, NoSuchJob):
        return EXIT_NO_JOB
    if isinstance(error, DaemonUnavailable):
        return EXIT_NO_DAEMON
    # A value that the daemon refuses is a failure. A value that can't be sent is wrong usage.
    is_refused = isinstance(error.__cause__, grpc.RpcError)
    return EXIT_USAGE if isinstance(error, ConfigError) and not is_refused else EXIT_FAILED


if __name__ == "__main__":
    main()
