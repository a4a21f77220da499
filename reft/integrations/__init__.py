"""reft in one line for trainers that own the training loop. One module for each trainer.

    transformers.ReftCallback    Trainer(..., callbacks=[ReftCallback()])
    lightning.ReftCallback       Trainer(..., callbacks=[ReftCallback()])
    accelerate.attach            attach(accelerator, model, optimizer, loader, scheduler)
    deepspeed.attach             attach(engine, state={"data": data})
    megatron.attach              attach(model_chunks, optimizer, opt_param_scheduler, data)
    torchtitan                   config.checkpoint = ReftCheckpointManager.Config()

No module imports its trainer before the adapter is used. An adapter first checks that the trainer
has every name that the adapter reads. If a name is missing, the error states the tested version.
`loader` is a `reft.ResumableLoader`. The data position is part of each adapter. If a restart can't
restore it exactly, a line says so at start.
"""
