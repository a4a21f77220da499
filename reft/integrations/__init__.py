"""reft in one line for trainers that own the loop. A module each; none of them imports its trainer before it is used.

    transformers.ReftCallback    Trainer(..., callbacks=[ReftCallback()])
    lightning.ReftCallback       Trainer(..., callbacks=[ReftCallback()])
    accelerate.attach            session = attach(accelerator, model, optimizer, Batches(loader), scheduler)
    deepspeed.attach             session = attach(engine, state={"data": data})
    megatron.attach              session = attach(model_chunks, optimizer, opt_param_scheduler, data)
    torchtitan                   config.checkpoint = ReftCheckpointManager.Config()

What an adapter reads from its trainer is checked first; where a name is missing, the error says which version was tested.
The data position is part of each; what of it can't be brought back is said when training starts.
"""
