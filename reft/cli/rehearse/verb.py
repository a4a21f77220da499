"""Carries out the verb: shows what happens, and what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from reft.cli.rehearse.report import EXIT_CODES, document, first_lines, report_lines
from reft.cli.rehearse.run import RehearsalRequest, rehearse


def run_verb(
    arguments: Sequence[str], steps: int, kill: str, folder: Path | None, timeout_s: float, as_json: bool
) -> int:
    """Rehearses, and returns the exit code.

    Args:
        arguments: the user's command.
        steps, kill, folder, timeout_s: as in `RehearsalRequest`.
        as_json: stdout is only for the document; lines for people go to stderr.

    Raises:
        ConfigError: the command can't be rehearsed.
        RehearsalError: a run failed.
    """
    request = RehearsalRequest(arguments, steps, kill, folder, timeout_s)
    for line in first_lines(request):
        click.echo(line, err=as_json)
    report = rehearse(request, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(json.dumps(document(report), indent=2))
    else:
        click.echo("\n".join(report_lines(report)))
    return EXIT_CODES[report.result.outcome]
