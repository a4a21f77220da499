"""`reft.attach`: makes a session from the user's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reft.client.attach.arguments import AttachArguments, AttachContext
from reft.client.attach.launcher import agents_command, complete_error_file, dropped_backend
from reft.client.attach.plan import slots_of
from reft.client.attach.reattach import PlacementReviews
from reft.client.attach.run import AttachResult, run_attach
from reft.client.data.loader import ResumableLoader
from reft.client.link.rank_group import RankGroup
from reft.client.session import Session
from reft.config import Config, Launch
from reft.console import name_warnings, say
from reft.errors import ConfigError
from reft.failpoints import Failpoints
from reft.wire import rpc


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
        for each in _named_objects(state).values():
            if isinstance(each, ResumableLoader):
                each.state_dict()  # else it would say that no attach was given it
        return Session(
            None, optimizers, step=0, restored_from=None, counts_calls=False, cadence=None, seal_deadline_s=0
        )
    rank_group, calls = RankGroup(settings.attach_deadline_s), rpc.DaemonCalls()
    try:
        launch = Launch.load()
        if not launch.rank and (notice := dropped_backend(launch, agents_command())):
            say(notice)
        complete_error_file()
        requested = settings.tolerate if tolerate is None else tolerate
        attach_arguments = AttachArguments(
            model=model,
            optimizers=optimizers,
            schedule=schedule,
            state=_named_objects(state),
            tolerate=None if requested == -1 else requested,
            protect=settings.protect if protect == "auto" else protect,
            every=1 if every in (None, "auto") else every,
            adapts=every == "auto",
        )
        context = AttachContext(settings, launch, rank_group, attach_arguments, Failpoints(settings.failpoints), calls)
        result = run_attach(context)
    except BaseException:
        rank_group.close()
        raise
    finally:
        calls.close()
    return _with_reviews(context, result)


def _named_objects(state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of `state`.

    Raises:
        ConfigError: it gives its objects no names.
    """
    if state is not None and not isinstance(state, Mapping):
        raise ConfigError(f"state is a {type(state).__name__}; it maps names to objects.", 'state={"lr": schedule}')
    return dict(state or {})


def _with_reviews(context: AttachContext, result: AttachResult) -> Session:
    """Returns the session, with placement reviews if other ranks may have parts of its state.

    The reviews keep the rank group; without reviews the rank group is closed.
    """
    session, manifest = result.session, result.manifest
    if manifest.world > 1 and context.request.protect != "none":
        # A review may find state to exchange, but the ranks keep the slots that they have.
        context = replace(context, settings=replace(context.settings, slots=slots_of(context.settings, manifest)))
        session.review(PlacementReviews(context, tuple(manifest.mismatched), session.step))
    else:
        context.rank_group.close()
    return session
