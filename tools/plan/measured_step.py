"""What a step on a fake GPU showed; importing this does not import torch."""

import msgspec


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of one step of the learner, in bytes on the device of rank 0 unless noted otherwise."""

    num_parameters: int  # of the whole model, with adapters
    num_base_parameters: int  # without them: of an engine
    num_kv_heads: int
    kv_token_bytes: int  # keys and values of one token in all layers that attend, in bfloat16, on one GPU
    num_attending: int  # layers that attend, of
    num_layers: int
    attention: str  # the kernel, in words
    dtypes: dict[str, list[str]]  # of what stays between steps: "torch.float32 on cuda"
    weights_bytes: int  # with buffers
    loading_peak_bytes: int
    loading_host_bytes: int  # of rank 0, which reads the folder; the others need next to nothing
    trained_bytes: int  # float32 weights of this rank that are trained; the gradient and each moment have as many
    offloaded_bytes: int  # weights and moments in host memory
    other_models_bytes: int  # critic and reference, with their moments
    step_peak_bytes: int  # everything, at the highest moment of a step
    publish_peak_bytes: int  # everything, at the highest moment of a publish
    published_bytes: int  # of one version, in host memory
    waits: dict[str, int]  # where the host waits for the device in a step, and how often
