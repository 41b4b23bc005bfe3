"""How much a token costs to compute: what `plan` bounds a step by, and what a share of a device's peak (MFU) means."""

from torch import nn

from torchtitan_lite.models import Transformer


def multiplied_parameters(model: Transformer) -> int:
    """Parameters that every token is multiplied with: all but tables that are looked up, unless they are the output."""
    looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} - {model.output.weight}
    return sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in looked_up)


def flops_per_token(model: Transformer, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token, without what checkpointing computes again.

    6 (N - N_embedding) + 12 L H Q T: a product with a matrix is 2 operations per entry, backward two such products;
    attention is the other term, with L layers, H heads of width Q and T = seq_len, as if not causal. (PaLM, appendix B,
    arXiv 2204.02311; torchtitan counts the same. Tied embeddings are a matrix here, as they are multiplied with.)
    """
    config = model.config
    attention = 12 * config.n_layers * config.n_heads * config.dim_of_heads * seq_len
    return 6 * multiplied_parameters(model) + attention
