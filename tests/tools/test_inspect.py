"""`train.py --inspect`: the sharded model and its groups, before anything is allocated or written."""

from pathlib import Path

from tests.helpers import ranks, succeeded, tiny


def test_inspect_prints_the_model_and_its_groups(text: Path, tmp_path: Path) -> None:
    more = {
        **{"model__family": "llama", "model__hidden_dim": 50, "model__qk_norm": "false", "run__name": "run"},
        "fsdp__precision_overrides": '[{match = "layers.0.*", param_dtype = "float32", output_dtype = "bfloat16"}]',
        **{"optim__freeze": '["layers.1.*"]', "fsdp__param_dtype": "bfloat16"},
    }
    output = succeeded(ranks(2, "--inspect", *tiny(text, tmp_path, **more)))
    assert output.count("FSDPLlama(") == 1
    assert "2 x FSDPTransformerBlock(" in output
    table = [line.split("  ") for line in output[output.index("\ngroup ") :].splitlines() if line]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in table}
    # 517 x 32 values: rank 0 holds 259 rows in float32, and gathers all of them in bfloat16
    mib = [259 * 32 * 4 / 2**20, 517 * 32 * 2 / 2**20]
    assert cells["tok_embeddings"] == [
        *("16,544", "0", *(f"{m:.2f}" for m in mib), "bf16", "fp32", "True", "(Shard(dim=0),)")
    ]
    block = 4 * 32 * 32 + 3 * 32 * 50 + 2 * 32
    assert cells["layers.0"][:2] == [f"{block:,}", "0"]
    assert cells["layers.0"][4:6] == ["fp32 -> bf16", "fp32"]
    assert cells["layers.1"][:2] == [f"{block:,}", f"{block:,}"]
    assert cells["norm, output"][-2:] == ["False", "(Shard(dim=0),)"]
    assert cells["total"][0] == f"{2 * 16_544 + 2 * block + 32:,}"
    assert not (tmp_path / "run").exists()
    output = succeeded(ranks(2, "--inspect", *tiny(text, tmp_path, fsdp__dp_shard=1)))
    assert "(Replicate(), Shard(dim=0))" in output, "the mesh"
