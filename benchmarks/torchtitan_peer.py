"""torchtitan with Llama 3.2's 1B shape on random tokens: `torchrun -m benchmarks.torchtitan_peer ARGUMENTS`.

For torchtitan 0.2.2, which runs with torch 2.11. It has no model of this size and reads text from the network, so this
script adds the size and random tokens. Everything else is torchtitan's: model, FSDP2, checkpointing, compiling, loop
and log lines. Its output matrix is not tied to the embedding. On one GPU it uses autocast instead of FSDP2.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 128256
SIZE = {
    **{"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": VOCABULARY},
    **{"ffn_dim_multiplier": 1.5, "multiple_of": 256, "rope_theta": 500000},
}
ARGUMENTS = ["--model.name=llama3", "--model.flavor=1B", "--validation.no-enable"]


class RandomTokens:
    """A data loader for torchtitan, with random batches.

    Args:
        job_config: torchtitan's config, for the batch size.
        others: arguments for real loaders, unused.
    """

    def __init__(self, job_config: Any, **others: Any) -> None:
        self.shape = job_config.training.local_batch_size, job_config.training.seq_len + 1

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(VOCABULARY, self.shape).pin_memory()
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    """Run torchtitan's main with this model and these tokens."""
    unused: Any = types.ModuleType("datasets")  # torchtitan imports it; these runs read no text
    unused.Dataset = unused.load_dataset = None
    unused.distributed = types.ModuleType("datasets.distributed")
    unused.distributed.split_dataset_by_node = None
    sys.modules |= {"datasets": unused, "datasets.distributed": unused.distributed}
    sys.argv[1:1] = ARGUMENTS  # before the import, which reads them
    from torchtitan import train
    from torchtitan.models import llama3

    llama3.llama3_args["1B"] = llama3.TransformerModelArgs(**SIZE)
    spec = llama3.get_train_spec()
    spec.build_dataloader_fn, spec.build_tokenizer_fn = RandomTokens, lambda config: None
    train.train_spec_module.get_train_spec = lambda name: spec
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
