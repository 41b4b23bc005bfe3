"""torchtitan_lite: pretraining of Transformers with PyTorch FSDP2, from a laptop to a cluster."""

__version__ = "0.2.0"
