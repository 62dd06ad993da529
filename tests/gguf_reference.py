"""transformers' own reading of a GGUF file (torch), to compare with."""


def load(path, config):
    """Returns a torch model, and the config dict that transformers reads.

    `from_pretrained(..., gguf_file=...)` does the same, but parses the file three times
    (seconds each where it has a vocabulary) and asks for the package accelerate.

    Args:
      path: The file.
      config: Config dict to build the model from; float32, eager attention.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    return model, read["config"]
