"""Makes the engine that copies the state of this rank."""

from __future__ import annotations

from reft.client.attach.arguments import AttachContext
from reft.client.attach.introduce import Introduction
from reft.client.memory.cuda import Device
from reft.client.memory.threads import ComputeThreads, copy_cpus, has_idle_cores
from reft.client.snapshot.cpu_engine import CpuCopyEngine
from reft.client.snapshot.engine import CopyEngine


def copy_engine(context: AttachContext, introduction: Introduction) -> CopyEngine:
    """Returns the engine that copies the state of this rank's device."""
    settings, device = context.settings, introduction.state.device
    if device.type == "cuda":
        from reft.client.snapshot.cuda_engine import CudaCopyEngine

        return CudaCopyEngine(Device(device), settings.parity_scratch_bytes, settings.overrun_scratch_bytes)
    teams = [introduction.ranks.infos[rank].process.team for rank in introduction.node.ranks]
    return CpuCopyEngine(copy_cpus(), has_idle=has_idle_cores(ComputeThreads.own(), teams))
