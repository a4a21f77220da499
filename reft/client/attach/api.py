"""`reft.attach`: makes a session from the user's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reft.client.attach.arguments import AttachArguments
from reft.client.attach.launcher import agents_command, dropped_backend
from reft.client.attach.reattach import PlacementReviews
from reft.client.attach.run import Attachment
from reft.client.link.rank_group import RankGroup
from reft.client.session import Session
from reft.config import Config, Launch
from reft.console import name_warnings, say


def attach(
    model: Any, optimizer: Any, schedule: Any, *, state: Mapping[str, Any] | None, tolerate: int | None, protect: str,
    every: Any, slots: int | None, job: str | None, daemon: str | None, config: Config | None,
) -> Session:  # fmt: skip
    """Attaches this rank; see `reft.attach`."""
    name_warnings()
    arguments = {"job": job, "daemon": daemon, "slots": slots}
    overrides: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    settings = replace(config, **overrides) if config else Config.load(**overrides)
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if settings.mode == "off":
        say("switched off (REFT_MODE=off): no snapshots are taken.")
        return Session(
            None, optimizers, step=0, restored_from=None, counts_calls=False, cadence=None, seal_deadline_s=0
        )
    rank_group = RankGroup(settings.attach_deadline_s)
    try:
        launch = Launch.load()
        if not launch.rank and (notice := dropped_backend(launch, agents_command())):
            say(notice)
        requested = settings.tolerate if tolerate is None else tolerate
        attach_arguments = AttachArguments(
            model, optimizers, schedule, dict(state or {}), None if requested == -1 else requested,
            settings.protect if protect == "auto" else protect, 1 if every in (None, "auto") else every, every == "auto",
        )  # fmt: skip
        attachment = Attachment(settings, launch, rank_group, attach_arguments)
        session = attachment.run()
    except BaseException:
        rank_group.close()
        raise
    return _with_reviews(session, attachment)


def _with_reviews(session: Session, attachment: Attachment) -> Session:
    """Adds placement reviews to the session, if nodes can protect one another.

    The reviews keep the rank group; without reviews the rank group is closed.
    """
    domains = {node.domain or node.id for node in attachment.nodes}
    if len(domains) > 1 and attachment.request.protect != "none":
        session.review(PlacementReviews(attachment, session.step))
    else:
        attachment.rank_group.close()
    return session
