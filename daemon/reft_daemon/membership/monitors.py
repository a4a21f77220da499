"""The monitors of this daemon: which jobs are watched, and by which of their names.

Agents know a job by their launcher's name, trainers by `job=`. The two names are paired by the
launch: reft's agents give the launch to their trainers, which write it into the manifest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from reft.core.membership.job_identity import check_name
from reft.core.recovery.survey_timeout import GivenUpNodes
from reft.errors import AttachError, NoRoom
from reft_daemon.jobs.changes import ChangeQueue
from reft_daemon.jobs.job_record import JobRecord
from reft_daemon.membership.agent_process import AgentProcess
from reft_daemon.membership.job_monitor import JobMonitor, MembershipView

MONITORS_MAX = 256


class JobNotWatched(AttachError):
    """This daemon does not watch the job."""


class MonitorRegistry:
    """All monitors of one daemon.

    Args:
        own: id of this node.
        jobs: name → this daemon's record of the job; the name is the one that trainers use.
        changes: where monitors put the ends of agents.
    """

    def __init__(self, own: str, jobs: Mapping[str, JobRecord], changes: ChangeQueue) -> None:
        self._own = own
        self._jobs = jobs
        self._changes = changes
        self.by_name: dict[str, JobMonitor] = {}

    def find(self, job: str) -> JobMonitor | None:
        """Returns the monitor of a job; None if the job is not watched.

        The name may be the agents' or the trainers'.
        """
        job_record = self._jobs.get(job)
        launch = job_record.record.manifest.launch if job_record else ""
        paired_monitors = [each for each in self.by_name.values() if launch and each.view.launch == launch]
        return self.by_name.get(job) or (paired_monitors[0] if paired_monitors else None)

    def find_or_raise(self, job: str) -> JobMonitor:
        """Returns the monitor of a job.

        Raises:
            JobNotWatched: there is none.
        """
        monitor = self.find(check_name(job))
        if monitor is None:
            raise JobNotWatched(f"this daemon watches no job {job!r}.")
        return monitor

    def record_of(self, monitor: JobMonitor) -> JobRecord | None:
        """Returns this daemon's record of a watched job; None before the first attach."""
        return self._find_record(monitor.name, monitor.view.launch)

    def _find_record(self, name: str, launch: str) -> JobRecord | None:
        paired_records = [each for each in self._jobs.values() if launch and each.record.manifest.launch == launch]
        return self._jobs.get(name) or (paired_records[0] if paired_records else None)

    def agent_of(self, job: str) -> AgentProcess | None:
        """Returns a job's agent on this node; None: there is none, or it was not heard yet."""
        monitor = self.find(job)
        return monitor.agent if monitor else None

    def tokens(self, job: str) -> list[bytes]:
        """Returns the tokens that admit a job's agents and daemons over TCP.

        There are none if the job is not watched. Without agents they are the job's.
        """
        monitor = self.find(job)
        if monitor is None:
            return []
        record = None if monitor.view.launch else self.record_of(monitor)
        return [monitor.view.token, *(record.record.accepted_tokens if record is not None else ())]

    def tokens_of_agent(self, job: str) -> list[bytes]:
        """Returns the tokens that the job's agent has told: its launch's, and the job's."""
        monitor = self.find(job)
        view = monitor.view if monitor is not None and monitor.view.launch else None
        return [token for token in (view.token, view.job_token) if token] if view is not None else []

    def node_name(self, job: str, node_id: str) -> str:
        """Returns the name of a watched job's node; empty if it has no such node."""
        monitor = self.find(job)
        return monitor.view.nodes[node_id].name if monitor and node_id in monitor.view.nodes else ""

    def job_token(self, launch: str) -> bytes:
        """Returns the token for a launch's trainers; empty if their agent gave none."""
        views = (monitor.view for monitor in self.by_name.values())
        return next((view.job_token for view in views if launch and view.launch == launch), b"")

    def given_up_s(self, job: str, launch: str, round: int) -> dict[str, float]:
        """Returns the nodes that the previous round lost → seconds since the loss.

        Only nodes that this round lacks are returned. The result is empty if this daemon watches
        another round or launch.
        """
        monitor = self.find(job)
        given_up = monitor.given_up if monitor else GivenUpNodes()
        now_s = time.monotonic()
        is_same_round = (given_up.launch, given_up.round) == (launch, round)
        return {node: now_s - at_s for node, at_s in given_up.nodes.items()} if is_same_round else {}

    def note_decision(self, job: JobRecord) -> None:
        """Takes a new decision, or one found in the arena.

        Without agents, its manifest gives the membership view.

        Raises:
            NoRoom: too many jobs are watched.
        """
        manifest = job.record.manifest
        monitor = self.find(job.id)
        if monitor is not None and monitor.view.launch:
            monitor.note_attach()
            return
        if not job.record.HasField("decision"):
            return
        round = job.epoch.counter
        if manifest.nodes[job.record.node_index].id != self._own or (monitor and monitor.view.round >= round):
            return
        self.start_view(job.id, MembershipView("", round, manifest.token, {node.id: node for node in manifest.nodes}))

    def note_undo(self, job: JobRecord) -> None:
        """Takes the decision before a refused attach. Agents keep their membership view."""
        monitor = self.find(job.id)
        if monitor is not None and not monitor.view.launch:
            self.forget(job.id)
        self.note_decision(job)

    def start_view(self, name: str, view: MembershipView) -> JobMonitor:
        """Starts a membership view of a job; watches the job if it was not watched.

        Raises:
            NoRoom: too many jobs are watched.
        """
        if name in self.by_name:
            monitor = self.by_name[name]
            monitor.start_view(view, self.record_of(monitor))
            return monitor
        if len(self.by_name) >= MONITORS_MAX:
            raise NoRoom(f"this daemon watches {len(self.by_name)} jobs; the limit is {MONITORS_MAX}.")
        job_record = self._find_record(name, view.launch)
        monitor = self.by_name[name] = JobMonitor(name, self._own, view, self._changes, job_record)
        if view.launch and job_record is not None and job_record.id != name:
            # The restarted daemon has found the trainers before it heard their agents. Until now it
            # watched the job by the trainers' name.
            self.forget(job_record.id)
        return monitor

    def forget(self, name: str) -> None:
        """Stops watching a job: it was purged, or nobody works on it any more.

        A living agent's next beat starts the watch again.
        """
        monitor = self.by_name.pop(name, None)
        if monitor is not None:
            monitor.close()
