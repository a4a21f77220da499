"""How long the slots of an ended job stay, and the line at their end."""

from __future__ import annotations

import time
from typing import NamedTuple

from reft.core.membership.failure_detector import AgentPhase
from reft.log_lines import audit
from reft_daemon.jobs.job_record import UNKNOWN, JobRecord, whole_words
from reft_daemon.jobs.leases import have_ended_well
from reft_daemon.membership.agent_process import AgentProcess


def may_be_dropped(job: JobRecord, agent: AgentProcess | None) -> bool:
    """Returns whether another job may have this job's memory before its time is over.

    Args:
        job: the job.
        agent: the job's agent on this node; None: there is none.
    """
    if job.is_live or job.record.manifest.named or job.slots.unreadable:
        return False
    return agent is None or not agent.may_start_workers


class RetentionTimes(NamedTuple):
    """Seconds for which a job's slots are kept after its last trainer ended.

    Attributes:
        ended: for jobs that ended well, and for jobs that nobody can start again.
        failed: for all other jobs: people may have to be woken to start them again.
    """

    ended: float
    failed: float

    def seconds_for(self, job: JobRecord, agent: AgentProcess | None) -> float:
        """Returns a job's time to live.

        Args:
            job: the job.
            agent: the job's agent on this node; None: there is none, or this daemon was restarted.
        """
        return self.failed if _may_go_on(job, agent) else self.ended

    def end_cause(self, job: JobRecord, agent: AgentProcess | None) -> str:
        """Returns why a job is freed, whose time to live is over."""
        flag = "--ttl-failed" if _may_go_on(job, agent) else "--ttl"
        return f"its time to live of {self.seconds_for(job, agent):.0f} s was over ({flag})"

    def left_s(self, job: JobRecord, agent: AgentProcess | None) -> float:
        """Returns for how many seconds an ended job's slots are kept yet."""
        return max(0.0, self.seconds_for(job, agent) - (time.monotonic() - job.ended_s))


def _may_go_on(job: JobRecord, agent: AgentProcess | None) -> bool:
    """Returns whether somebody can start the job again, and it did not end well.

    A job with a name, or with a living agent, can be started again. It ended well if its agent says
    so; without an agent, if all sessions were closed, and none because of an exception. On nodes
    without ranks of the job, the job counts as failed.
    """
    ended_well = agent.phase is AgentPhase.FINISHED if agent else have_ended_well(job.leases)
    may_return = job.record.manifest.named or (agent is not None and agent.is_alive)
    return may_return and not ended_well


def audit_freed(name: str, job: JobRecord | None, why: str, nbytes: int) -> None:
    """Writes the audit line of a job that this daemon has freed by itself.

    Args:
        name: of the job.
        job: the job; None: its record is damaged.
        why: the daemon did that.
        nbytes: that were freed.
    """
    ended_s = time.monotonic() - job.ended_s if job and not job.is_live else 0.0
    step = whole_words(job) if job else UNKNOWN
    audit("freed", job=name, why=why, ended_s=f"{ended_s:.0f}", whole_step=step, freed_bytes=nbytes)
