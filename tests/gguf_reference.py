"""transformers' own reading of a GGUF file (torch), to compare with."""


def load(path, **overrides):
    """Returns a float32 torch model, eager attention, built as transformers would.

    Args:
      path: The file.
      **overrides: Config values that transformers does not read from the file.

    `from_pretrained(..., gguf_file=...)` asks for one more package, accelerate, to do
    the same.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(
        path.parent, gguf_file=path.name, **overrides
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    missing, unexpected = model.load_state_dict(tensors["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    return model
