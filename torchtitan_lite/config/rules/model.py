"""Rules of the model: its sizes, muP, and encoder-decoders."""

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, Machine, ModelConfig, Rules


def shape_rules(model: ModelConfig) -> Rules:
    """Yield the broken rules between the sizes of a model."""
    if model.dim % model.n_heads and not model.head_dim:
        works = max(d for d in range(1, model.n_heads + 1) if model.dim % d == 0)
        yield (
            "model.n_heads model.dim",
            f"model.dim = {model.dim} is not a multiple of model.n_heads = {model.n_heads}; n_heads = {works} works",
        )
    reads = FAMILIES[model.family].keys
    if "n_kv_heads" in reads and model.n_heads % model.kv_heads:
        works = max(k for k in range(1, model.kv_heads + 1) if model.n_heads % k == 0)
        yield (
            "model.n_kv_heads model.n_heads",
            f"model.n_heads = {model.n_heads} is not a multiple of model.n_kv_heads = {model.kv_heads}; "
            f"n_kv_heads = {works} works",
        )
    if "rope_theta" in reads and model.dim_of_heads % 2:
        yield (
            "model.head_dim model.dim",
            f"rotary positions need an even head_dim, not {model.dim_of_heads}; "
            f"head_dim = {model.dim_of_heads + 1} works",
        )
    if model.has_experts and model.experts_per_token > model.n_experts:
        yield (
            "model.experts_per_token model.n_experts",
            f"model.experts_per_token = {model.experts_per_token} is more than model.n_experts = {model.n_experts}; "
            f"experts_per_token = {model.n_experts} works",
        )
    if "delta" in model.layer_pattern and not FAMILIES[model.family].delta:
        known = " or ".join(f'"{name}"' for name, family in FAMILIES.items() if family.delta)
        yield (
            "model.layer_pattern model.family",
            f'model.layer_pattern has "delta", which model.family = "{model.family}" does not have; '
            f"family = {known} works",
        )


def rules(config: Config, machine: Machine) -> Rules:
    """Yield the broken rules of [model], and between it and other sections."""
    model = config.model
    yield from shape_rules(model)
    if model.mup_base_dim and model.tie_embeddings:
        yield (
            "model.mup_base_dim model.tie_embeddings",
            f"model.mup_base_dim = {model.mup_base_dim} gives embeddings and output matrix different initial values "
            "and learning rates, but model.tie_embeddings = true ties them; model.tie_embeddings = false works",
        )
    if model.mup_base_dim and config.optim.name == "sgd":
        yield (
            "model.mup_base_dim optim.name",
            f"model.mup_base_dim = {model.mup_base_dim} scales learning rates for updates of a fixed size, like Adam's "
            'and Muon\'s; those of optim.name = "sgd" vary with the gradient; optim.name = "muon" or "adamw" works',
        )
    if not FAMILIES[model.family].encoder_decoder:
        return
    if config.fsdp.uses_float16:
        yield (
            "fsdp.param_dtype model.family",
            f'model.family = "{model.family}" can\'t compute in float16: the outputs of its feed-forward exceed 65504, '
            'the largest float16 number, in published models; "bfloat16" works in its place as param_dtype, '
            "reduce_dtype and output_dtype",
        )
    if model.tie_embeddings and not model.scale_output and not model.init_from:
        yield (
            "model.tie_embeddings model.scale_output",
            "model.tie_embeddings = true needs model.scale_output = true, or the initial logits are too large by "
            f"a factor of {model.dim**0.5:.0f}; scale_output = true works, and so does tie_embeddings = false",
        )
    if config.data.target_len > model.max_seq_len:
        yield (
            "data.target_len model.max_seq_len",
            f"data.target_len = {config.data.target_len} is longer than model.max_seq_len = {model.max_seq_len}; "
            f"model.max_seq_len = {config.data.target_len} works",
        )
