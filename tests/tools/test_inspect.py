"""`train.py --inspect`: the sharded model and its groups, before anything is allocated or written."""

from pathlib import Path

from tests.helpers import ranks, succeeded, tiny

MODEL = """\
FSDPLlama(
  (tok_embeddings): FSDPEmbedding(517, 32)
  (layers): ModuleList(
    (0-1): 2 x FSDPTransformerBlock(
"""
# rank 0 holds 259 of the 517 rows of the embeddings
GROUPS = """\
group           parameters  frozen  shard MiB  full MiB  computes      reduces  reshard  placements
tok_embeddings      16,544       0       0.03      0.03  bf16          fp32     True     (Shard(dim=0),)
layers.0             8,960       0       0.02      0.03  fp32 -> bf16  fp32     True     (Shard(dim=0),)
layers.1             8,960   8,960       0.02      0.02  bf16          fp32     True     (Shard(dim=0),)
norm, output        16,576       0       0.03      0.03  bf16          fp32     False    (Shard(dim=0),)
total               51,040               0.10
"""


def test_inspect_prints_the_model_and_its_groups(text: Path, tmp_path: Path) -> None:
    more = {
        **{"model__family": "llama", "model__hidden_dim": 50, "model__qk_norm": "false", "run__name": "run"},
        "fsdp__precision_overrides": '[{match = "layers.0.*", param_dtype = "float32", output_dtype = "bfloat16"}]',
        **{"optim__freeze": '["layers.1.*"]', "fsdp__param_dtype": "bfloat16"},
    }
    output = succeeded(ranks(2, "--inspect", *tiny(text, tmp_path, **more)))
    assert output[output.index("FSDPLlama(") :].startswith(MODEL)
    assert output.endswith(f"\n\n{GROUPS}")
    assert not (tmp_path / "run").exists()
    output = succeeded(ranks(2, "--inspect", *tiny(text, tmp_path, fsdp__dp_shard=1)))
    assert "(Replicate(), Shard(dim=0))" in output, "the mesh"
