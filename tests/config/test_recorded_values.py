"""What configs come to, recorded: each size of each family, what follows from given keys, and the rules of each key.

Nothing else holds: active and multiplied parameters and kinds of layers (recorded_models.json), and the words of
"needed" and most of "refused" and "edges" (recorded_keys.json); read their diffs. test_model.py has published sizes,
test_plan.py counts FLOPs.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import train
from tests.config.parsing import PAIRS, T5, mistakes, only_built_in, write
from tests.helpers import ROOT, meta_model
from tests.recorded import assert_recorded
from torchtitan_lite.config import cli, schema, toml
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.config.section import IS_PATH
from torchtitan_lite.run.mfu import active_parameters, flops_per_token, multiplied_parameters

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    only_built_in(monkeypatch)
    monkeypatch.chdir(ROOT)


def loaded(*argv: str, world_size: int = 1, local_world_size: int = 1) -> toml.Loaded:
    """On a machine without GPUs, whose files and compiler are not looked at."""
    return cli.parse(
        argv, elsewhere=True, world_size=world_size, n_gpus=0, local_world_size=local_world_size or world_size
    ).loaded


# --- models -----------------------------------------------------------------------------------------------------


def model_lines(model: ModelConfig) -> Iterator[str]:
    """Its keys that are not the default, what follows from them, its layers, its parameters and FLOPs."""
    changed = {key: value for key, value in model.model_dump().items() if value != schema.default_of(f"model.{key}")}
    yield ", ".join(f"{key} {toml.format_value(value)}" for key, value in changed.items() if key != "family")
    derived = "stacks", "kv_heads", "dim_of_heads", "dim_of_ffn", "has_experts", "has_room_for_induction"
    values = {name: getattr(model, name) for name in derived}
    values |= {"delta_dims": model.delta_dims} if "delta" in model.layer_kinds else {}
    yield ", ".join(f"{name} {value}" for name, value in values.items() if value)
    resolved = {key: value for key, value in model.resolved().items() if value != getattr(model, key)}
    yield f"resolved: {', '.join(f'{key} {value}' for key, value in resolved.items())}"
    layers = itertools.groupby(zip(model.layer_kinds, model.windows, strict=True))
    yield ", ".join(f"{len([*group])} {kind} {window}" for (kind, window), group in layers)
    built = meta_model(model, model.vocab_size or 517)
    counts = sum(p.numel() for p in built.parameters()), active_parameters(built), multiplied_parameters(built)
    flops = [flops_per_token(built, *lengths) for lengths in ((96,), (600, 70), (5000, 0))]
    yield f"parameters {counts[0]}, active {counts[1]}, multiplied {counts[2]}, FLOPs {flops}"


TWO = ["--model.n_layers=2", "--model.n_heads=2", "--model.dim=64"]
PATTERN = "--model.layer_pattern"
SHAPES = [
    ["--model.dim=200"],
    ["--model.dim=70"],
    ["--model.dim=320", "--model.size=3M"],
    ["--model.n_layers=9", "--model.vocab_size=1000"],
    ["--model.dim=320", "--model.n_kv_heads=1", "--model.head_dim=48", "--model.hidden_dim=500"],
    ["--model.mup_base_dim=64", "--model.qkv_bias", "--model.rope_factor=8", "--model.window=100"],
    [*TWO, f"{PATTERN}=window,full", "--model.window=7", "--model.n_layers=5"],
    [*TWO, f"{PATTERN}=full,nope,window", "--model.window=7"],
    [*TWO, f"{PATTERN}=full,full,nope", "--model.n_layers=3"],
    [*TWO, f"{PATTERN}=full,full,window", "--model.window=1", "--model.n_layers=3"],
    [*TWO, "--model.window=1"],
    [*TWO, "--model.qk_norm=false"],
    [*TWO, "--model.tie_embeddings"],
    [*TWO, "--model.n_heads=8"],
    [*TWO, "--model.n_heads=1"],
    [*TWO, "--model.n_heads=4"],
    [*TWO, "--model.n_layers=1"],
    [*TWO, "--model.family=olmo2", "--model.window=5"],
    ["--model.family=gpt", "--model.tie_embeddings=false", "--model.dropout=0.1"],
    ["--model.family=olmo_hybrid", f"{PATTERN}=full,delta", "--model.n_layers=3"],
    ["--model.family=qwen3_moe", "--model.n_experts=7", "--model.experts_per_token=3", "--model.router_bias"],
    ["--model.family=t5", "--model.gated=false", "--model.n_decoder_layers=5", "--model.head_dim=20"],
    ["--model.family=t5", "--model.tie_embeddings", "--model.scale_output"],
]


def test_the_values_and_figures_of_each_model() -> None:
    rows = [
        [f"--model.family={name}", f"--model.size={size}"] for name, entry in FAMILIES.items() for size in entry.sizes
    ]
    rows += [
        [f"--model.family={name}", shape] for name in FAMILIES for shape in ("--model.dim=320", "--model.n_layers=3")
    ]
    found = {}
    for options in (*rows, *SHAPES):
        words = [*options, *(T5[1:] if "--model.family=t5" in options else [])]
        name = " ".join(option.removeprefix("--model.") for option in options)
        found[name] = "\n".join(model_lines(loaded(*words).config.model))
    assert_recorded(found, HERE / "recorded_models.json")


# --- configs ----------------------------------------------------------------------------------------------------


def config_lines(found: toml.Loaded, world_size: int = 1) -> Iterator[str]:
    """Its values that are no defaults, with their origins, as --print-config has them; the layout; the length."""
    section = ""
    for line in toml.to_toml_with_origins(found).splitlines():
        if line.startswith("[") and line.endswith("]"):
            section = line.strip("[]")
        elif line and not line.endswith(" # default"):
            yield line if line.startswith("# ") else f"{section}.{' '.join(line.split())}"
    config, train_ = found.config, found.config.train
    layout = derive(config, world_size)
    yield str(layout).removeprefix("Layout")
    sizes = [train_.batch_size(step) for step in (1, 3, 4, 5, 6, 9, 10, 11, train_.steps)]
    if config.data.skip_samples:
        yield f"positions of 8 samples {[config.data.position(first, 8) for first in range(25)]}"
    tasks = f", tasks {config.tasks}" if config.tasks != ["brackets"] else ""
    yield (
        f"lengths {config.input_len} {config.target_len}, batches {sizes}, samples {train_.samples()}, "
        f"warm-up {config.optim.warmup_steps}, in epochs {config.in_epochs}{tasks}"
    )


ROWS: list[tuple[list[str], int, int]] = [  # options, ranks, and ranks of a machine
    *((argv, 8, 4) for argv in (
        ["--fsdp.sharding_strategy=FULL_SHARD"],
        ["--fsdp.sharding_strategy=full_shard", "--fsdp.reshard_after_forward=true", "--fsdp.dp_shard=8"],
        ["--fsdp.sharding_strategy=SHARD_GRAD_OP"],
        ["--fsdp.sharding_strategy=SHARD_GRAD_OP", "--fsdp.reshard_after_forward=default", "--fsdp.dp_shard=-1"],
        ["--fsdp.sharding_strategy=HYBRID_SHARD"],
        ["--fsdp.sharding_strategy=HYBRID_SHARD", "--fsdp.dp_replicate=4"],
        ["--fsdp.sharding_strategy=HYBRID_SHARD", "--fsdp.dp_shard=2"],
        ["--fsdp.sharding_strategy=_HYBRID_SHARD_ZERO2"],
        ["--fsdp.sharding_strategy=NO_SHARD", "--train.global_batch_size=64"],
    )),
    *((["--train.seq_len=64", "--train.micro_batch_size=3", *argv], 6, 6) for argv in (
        ["--train.global_batch_size=36"],
        ["--train.global_batch_size=37", "--fsdp.dp_replicate=3"],
        ["--train.global_batch_size=5", "--fsdp.dp_replicate=-1", "--fsdp.dp_shard=3"],
        ["--train.batch_schedule=[[0, 2], [9, 20], [10, 99]]", "--train.steps=10"],
        ["--train.batch_schedule=[[3, 4], [5, 9], [20, 99]]", "--train.steps=8"],
        [*T5, "--train.global_batch_size=18"],
        [*T5, "--data.noise_density=0.4", "--data.mean_span_length=2", "--train.seq_len=250"],
        [*T5[:1], *PAIRS, "--train.global_batch_size=18"],
        [*PAIRS, "--train.global_batch_size=18"],
    )),
    *((["--train.micro_batch_size=4", *argv], 1, 1) for argv in (
        ["--train.global_batch_size=4"],
        ["--train.global_batch_size=5"],
        ["--train.global_batch_size=4", "--fsdp.reshard_after_forward=true"],
        ["--train.epochs=2.5", "--optim.schedule=step", "--optim.step_every=epoch", "--eval.every=epoch"],
        ["--train.epochs=1", "--sample.every=epoch", "--checkpoint.every=epoch", "--eval.tasks_every=epoch"],
        ["--optim.step_every=epoch", "--eval.every=0"],
    )),
    (["--train.micro_batch_size=4", "--train.global_batch_size=5", "--fsdp.dp_replicate=2"], 2, 2),
    *((argv, 1, 1) for argv in (
        [],
        ["--mixed-precision", "--explicit-prefetching", "--dcp-api"],
        ["--train.steps=21"],
        ["--train.steps=20"],
        ["--train.steps=5"],
        ["--train.steps=20", "--train.epochs=1"],
        ["--train.steps=24", "--optim.schedule=wsd"],
        ["--train.steps=25", "--optim.schedule=wsd"],
        ["--train.steps=25", "--optim.schedule=WSD", "--optim.decay_ratio=0.5"],
        ["--model.size=3M", "--model.n_layers=2"],
        ["--model.size=1B"],
        ["--log.trackers=tensorboard, WandB", "--optim.freeze=layers.[0,1].*,norm.*", "--sample.prompts=One, two"],
        ["--log.trackers=", "--sample.prompts=def ", "--eval.tasks=brackets,my.jsonl", "--data.path=a.txt,b.txt",
         "--data.text_key=a,b"],
        ["--fsdp.param_dtype=bf16", "--fsdp.output_dtype=FP32", "--fsdp.reduce_dtype=Fp16", "--run.device=CPU"],
        ["--model.family=GPT", "--optim.name=AdamW", "--compile.backend=EAGER", "--run.deterministic"],
        ["--optim.betas=0.8,0.95", "--optim.lr=.5", "--optim.max_norm=inf", "--optim.eps=1e-6", "--run.tf32=True"],
        ["--optim.betas=(0.8, 0.9)", "--profile.steps=10,12", "--data.text_suffixes=.md, .py", "--run.name='a b'"],
        ["--data.text_suffixes="],
        ["--optim.groups=[{match = '*norm*', lr_factor = 0.5}, {match = 'a.*', weight_decay = 0.0}]"],
        ["--fsdp.precision_overrides=[{match = 'layers.0.*', param_dtype = 'bf16', output_dtype = 'float32'}]"],
        ["--data.sources={\"a b\" = 0.25, c = 0.75}", "--data.skip_samples=[[8, 12], [16, 20]]", "--eval.tasks=auto,x"],
    )),
]  # fmt: skip


SPELLED = [  # on the command line, and in a file
    *(("log.trackers", "tensorboard, WandB"), ("log.trackers", "tensorboard"), ("log.trackers", "")),
    *(("sample.prompts", "One, two"), ("sample.prompts", "def "), ("optim.freeze", "layers.[0,1].*,norm.*")),
    *(("fsdp.sharding_strategy", "full_shard"), ("fsdp.param_dtype", "bf16"), ("fsdp.output_dtype", "FP32")),
    *(("model.family", "GPT"), ("optim.name", "AdamW"), ("run.device", "CPU"), ("eval.tasks", "brackets,my.jsonl")),
]


def test_what_follows_from_the_keys_that_are_given(tmp_path: Path) -> None:
    """And what is printed, and a file with the same spellings, give the same config."""
    found, file = {}, tmp_path / "default.toml"
    for argv, world_size, local in (*ROWS, *(([f"--{key}={text}"], 1, 1) for key, text in SPELLED)):
        one = loaded(*argv, world_size=world_size, local_world_size=local)
        lines = [line for line in config_lines(one, world_size) if "# default of the family" not in line]
        found[" ".join([f"{world_size} x", *argv])] = lines
        for text in (toml.to_toml(one.config), toml.to_toml_with_origins(toml.Loaded(one.config, {}))):
            file.write_text(text)
            assert loaded("--config", str(file), world_size=world_size, local_world_size=local).config == one.config
    for key, text in SPELLED:
        section, name = key.split(".")
        file.write_text(f'[{section}]\n{name} = "{text}"\n')
        assert loaded("--config", str(file)).config == loaded(f"--{key}={text}").config
    for key, name in [(one, name) for one in ("model.family", "optim.name") for name in schema.REGISTRIES[one]]:
        more = T5[1:] if name == "t5" else []
        assert loaded(f"--{key}={name.upper()}", *more).config == loaded(f"--{key}={name}", *more).config, name
    assert_recorded(found, HERE / "recorded_configs.json")


def test_the_values_of_each_shipped_config() -> None:
    found = {
        file.stem: "\n".join(config_lines(loaded("--config", f"configs/{file.name}", world_size=8), 8))
        for file in sorted(ROOT.glob("configs/*.toml"))
    }
    assert_recorded(found, HERE / "recorded_shipped_configs.json")


# --- keys -------------------------------------------------------------------------------------------------------


def rule_of(key: str) -> str:
    """What a resume does with another value, and whether bits depend on it."""
    rule, bits = schema.resume_rule(key), schema.bitwise_keys().get(key)
    words = [
        rule.rule,
        *["a resume keeps it"] * schema.keeps_value(key),
        *([f"changes the {rule.changes}"] if rule.changes != "nothing" else []),
        *["a path"] * (IS_PATH in schema.known_keys()[key].metadata),
        *([f"bits: {bits}"] if bits else []),
        *([rule.note] if rule.note else []),
    ]
    return "; ".join(words)


UNUSED = [
    [  # with llama, and no validation, profile, or text to prepare
        *("--model.n_decoder_layers=3", "--model.dropout=0.1", "--model.n_experts=3", "--model.experts_per_token=1"),
        *("--model.norm_topk_prob", "--model.router_bias", "--model.gated=false", "--model.scale_output"),
        *("--model.window_rope_theta=5", "--model.window=9", "--model.layer_pattern=full", "--train.router_z_loss=1"),
        *("--train.router_aux_loss=1", "--model.rope_low_freq_factor=2", "--model.rope_high_freq_factor=5"),
        *(
            "--model.rope_original_max_seq_len=9",
            "--data.path=prepared",
            "--data.text_key=a",
            "--data.text_suffixes=.b",
            "--data.on_error=skip",
        ),
        *("--data.val_fraction=0.5", "--tokenizer.vocab_size=300", "--data.cache_dir=c", "--data.noise_density=0.3"),
        *("--data.mean_span_length=2", "--data.target_len=4", "--data.blind_source", "--data.source_prefix=a"),
        *("--data.source_key=a", "--data.target_key=b", "--eval.every=0", "--eval.samples=5", "--eval.tasks=auto"),
        *("--eval.tasks_every=5", "--eval.task_questions=5", "--profile.memory_snapshot", "--profile.ranks=[0]"),
        "--optim.step_every=3",
    ],
    [  # with gpt, and without steps, samples and kept checkpoints
        *("--model.family=gpt", "--model.n_kv_heads=2", "--model.head_dim=9", "--model.qk_norm", "--model.qkv_bias"),
        *("--model.rope_theta=5", "--model.rope_factor=2", "--model.rope_low_freq_factor=2", "--model.window=3"),
        *("--model.layer_pattern=full", "--model.induction_head", "--model.dropout=0.1", "--train.epochs=2"),
        *("--train.steps=40", "--sample.every=0", "--sample.prompts=a", "--sample.max_tokens=5", "--model.dim=96"),
        *("--sample.temperature=0.5", "--checkpoint.keep_latest=0", "--checkpoint.keep_every=5"),
        *("--checkpoint.keep_best", "--eval.every=0", "--spike.action=log", "--spike.loss_deviations=0"),
        *("--spike.norm_deviations=0", "--optim.schedule=step", "--optim.decay_ratio=0.3", "--optim.min_lr_ratio=0"),
    ],
    [  # with sgd
        *("--optim.name=sgd", "--optim.eps=1e-6", "--optim.betas=[0.8, 0.9]", "--optim.muon_momentum=0.8"),
        *("--optim.muon_embedding_lr_factor=2", "--optim.schedule=constant", "--optim.min_lr_ratio=0"),
        *("--optim.decay_ratio=0.3", "--optim.step_gamma=0.5", "--fsdp.pin_memory=false", "--fsdp.forward_prefetch=3"),
        *("--fsdp.backward_prefetch=3", "--activation_checkpointing.every=2", "--compile.backend=eager"),
        *("--grad_scaler.init_scale=2", "--grad_scaler.growth_interval=2", "--log.wandb_project=x"),
        *("--profile.steps=[100,102]", "--train.steps=40", "--spike.window=50", "--spike.loss_deviations=2"),
        *("--spike.norm_deviations=2", "--train.max_skipped=3", "--train.batch_schedule=[[0, 8]]"),
        *("--train.global_batch_size=16", "--model.family=qwen3_moe", "--train.router_bias_rate=1"),
    ],
    ["--optim.name=adamw", "--optim.muon_momentum=0.8", "--optim.eps=1e-6", "--optim.schedule=linear"],
    ["--model.rope_high_freq_factor=5", "--model.rope_factor=2", "--train.batch_schedule=[[1, 8]]"],
    ["--train.max_skipped=3", "--spike.action=skip", "--fsdp.reduce_dtype=float16", "--grad_scaler.init_scale=2"],
    ["--train.max_skipped=3", "--train.on_nonfinite=skip", "--fsdp.explicit_prefetching", "--fsdp.forward_prefetch=3"],
    ["--spike.action=stop", "--spike.loss_deviations=0", "--optim.schedule=wsd", "--optim.decay_ratio=0.3"],
    [
        "--checkpoint.keep_best",
        "--eval.every=0",
        "--profile.steps=[4,4]",
        "--train.epochs=1",
        "--train.router_z_loss=1",
    ],
    ["--eval.tasks=", "--eval.tasks_every=5", "--optim.schedule=step", "--optim.step_gamma=0.5", "--run.name=x"],
    ["--model.dim=64", "--model.n_heads=8", "--model.induction_head", "--model.window=3", "--log.trackers=wandb"],
    [*PAIRS, "--data.noise_density=0.3", "--compile.enabled", "--compile.backend=eager", "--log.wandb_project=x"],
    ["--model.init_from=there", "--data.path=prepared", "--tokenizer.path=here", "--tokenizer.vocab_size=300"],
    [*T5, "--model.init_from=there", "--model.mup_base_dim=0", "--data.noise_density=0.3"],
    ["--model.init_from=there", "--optim.lr=0.1", "--tokenizer.path=here", "--tokenizer.vocab_size=300"],
]

EDGES = {  # keys, and the nearest settings with which they are, and are not, used
    "profile.memory_snapshot=true": [
        *("train.steps=40 profile.steps=[40,41]", "train.steps=40 profile.steps=[41,42]", "profile.steps=[750,751]"),
        *("train.steps=40 profile.steps=[41,42] train.epochs=0.001", "profile.steps=[751,751]"),
        "train.steps=40 profile.steps=[] train.epochs=0",
    ],
    "train.global_batch_size=16": [
        *(f"train.batch_schedule={value}" for value in ("[]", "[[0,8]]", "[[1,8]]", "[[0,8],[1,16]]", "[[1,8],[2,16]]"))
    ],
    "eval.samples=9 checkpoint.keep_best=true checkpoint.keep_every=5 sample.every=1": [
        *("eval.every=0 checkpoint.keep_latest=1", "eval.every=1 checkpoint.keep_latest=0 checkpoint.every=1"),
        *("eval.every=1 checkpoint.keep_latest=1 checkpoint.every=0", "eval.every=epoch checkpoint.keep_latest=1"),
    ],
    "sample.prompts=a sample.max_tokens=5 sample.temperature=0.5": [
        *("sample.every=0 eval.every=1", "sample.every=1 eval.every=0", "sample.every=epoch eval.every=0"),
    ],
    "eval.tasks_every=5 eval.task_questions=5": [
        *("eval.tasks=[]", "eval.tasks=auto", "eval.tasks=brackets eval.every=0", "eval.tasks=auto data.path=a.txt"),
        *("eval.tasks=auto data.sources={a=1.0}", "eval.tasks=b.jsonl data.sources={a=1.0}"),
        *("eval.tasks=auto,brackets data.path=a.txt", "model.family=t5 data.objective=span_corruption"),
        "model.family=t5 data.objective=span_corruption eval.tasks=brackets",
    ],
    "log.wandb_project=x": [f"log.trackers={value}" for value in ("[]", "tensorboard", "wandb", "tensorboard,wandb")],
    "train.max_skipped=3 spike.window=4": [
        *("spike.action=off spike.loss_deviations=0.1 spike.norm_deviations=0.1", "train.on_nonfinite=skip"),
        *("spike.action=log spike.loss_deviations=0 spike.norm_deviations=0.1", "spike.action=skip"),
        *("spike.action=stop spike.loss_deviations=0.1 spike.norm_deviations=0", "train.on_nonfinite=stop"),
        "spike.action=log spike.loss_deviations=0 spike.norm_deviations=0",
    ],
    "grad_scaler.init_scale=2 grad_scaler.growth_interval=2": [
        *("fsdp.param_dtype=bfloat16 fsdp.reduce_dtype=bfloat16 fsdp.output_dtype=bfloat16", "fsdp.output_dtype=''"),
        *(f"fsdp.{name}_dtype=float16" for name in ("param", "reduce", "output")),
        *(
            f"fsdp.precision_overrides=[{{match='float16'}},{{match='b',{name}_dtype='{dtype}'}}]"
            for name in ("param", "reduce", "output")
            for dtype in ("bfloat16", "float16")
        ),
    ],
    "activation_checkpointing.every=2 compile.backend=eager": [
        *("activation_checkpointing.mode=none compile.enabled=true", "activation_checkpointing.mode=full"),
        "activation_checkpointing.mode=selective compile.enabled=false",
    ],
    "fsdp.forward_prefetch=3 fsdp.backward_prefetch=3 fsdp.pin_memory=false optim.name=adamw": [
        *("fsdp.explicit_prefetching=true fsdp.cpu_offload=false", "fsdp.explicit_prefetching=false"),
        "fsdp.explicit_prefetching=false fsdp.cpu_offload=true",
    ],
    "optim.betas=[0.8,0.9] optim.eps=1e-6 optim.muon_momentum=0.8 optim.muon_embedding_lr_factor=2": [
        *("optim.name=adamw", "optim.name=sgd", "optim.name=muon"),
    ],
    "optim.decay_ratio=0.3 optim.min_lr_ratio=0 optim.step_gamma=0.5 optim.step_every=3": [
        *(f"optim.schedule={name}" for name in ("cosine", "linear", "wsd", "constant", "step")),
    ],
    "train.router_aux_loss=1 train.router_z_loss=1 train.router_bias_rate=1": [
        *("model.family=qwen3_moe model.router_bias=true", "model.family=olmoe model.router_bias=true"),
        *("model.family=olmoe model.router_bias=false", "model.family=mistral"),
    ],
    "model.rope_low_freq_factor=2 model.rope_high_freq_factor=5 model.rope_original_max_seq_len=9": [
        *("model.rope_factor=1", "model.rope_factor=1.001", "model.rope_factor=2 model.family=mistral"),
    ],
    "model.window=9": [
        *("model.layer_pattern=window", "model.layer_pattern=full,nope", "model.layer_pattern=nope,window"),
        *("model.family=mistral", "model.family=olmo3", "model.family=olmo3 model.layer_pattern=full"),
        *("model.family=gemma3 model.layer_pattern=nope,window", "model.family=smollm3 model.layer_pattern=window"),
    ],
    "model.induction_head=true": [
        *("model.n_layers=1", "model.n_layers=2", "model.qk_norm=false", "model.tie_embeddings=true"),
        *("model.layer_pattern=full,nope", "model.layer_pattern=nope,full", "model.layer_pattern=full,full"),
        *("model.layer_pattern=full,full,nope model.n_layers=3", "model.layer_pattern=full model.window=1"),
        *("model.layer_pattern=full,window model.window=1", "model.layer_pattern=window,full model.window=1"),
        *("model.layer_pattern=full,full,window model.n_layers=3 model.window=1", "model.layer_pattern=full,window"),
        *("model.window=0", "model.window=1", "model.window=2", "model.n_heads=1 model.n_kv_heads=1"),
        *("model.n_heads=8", "model.n_heads=16", *(f"model.head_dim={width}" for width in (14, 16, 64, 66))),
        *(f"model.dim={dim} model.n_heads=2 model.head_dim=64" for dim in (127, 128, 129)),
        *("model.family=resformer", "model.family=resformer model.n_layers=1", "model.family=mistral"),
        *("model.family=resformer model.window=1", "model.init_from=there optim.lr=0.1"),
    ],
    (
        "data.text_key=a data.text_suffixes=.b data.val_fraction=0.5 data.cache_dir=c tokenizer.vocab_size=300 "
        "data.on_error=skip"
    ): [
        *("data.path=", "data.path=text", "data.path=prepared", "data.path=prepared,text", "tokenizer.path=here"),
        *("data.sources={prepared=1.0}", "data.sources={text=1.0,prepared=1.0}", "tokenizer.path="),
        *("data.sources={'./prepared'=1.0,prepared=1.0}", "tokenizer.path=here data.path=prepared"),
    ],
    "data.target_len=8 data.blind_source=true data.source_key=a data.target_key=b data.source_prefix=c": [
        *("data.objective=causal", "data.objective=pairs", "data.objective=pairs data.path=prepared"),
        "data.objective=span_corruption model.family=t5",
    ],
    "data.noise_density=0.3 data.mean_span_length=2": [
        *("data.objective=span_corruption model.family=t5", "data.objective=causal"),
        "data.objective=pairs model.family=t5 data.target_len=8 data.source_key=a data.target_key=b",
    ],
}


def refused_values() -> dict[str, list[str]]:
    """What is said about some values of each key; of all keys at once."""
    said: dict[str, dict[str, list[str]]] = {}
    for value in ("-1", "0", "1", "10000000000000000", "2.5", "x", "nan", "[]", "[2, 'x', {a = 3}]"):
        lines = mistakes(*(f"--{key}={value}" for key in schema.known_keys() if key != "model.family")).splitlines()
        for line in lines:
            if found := re.fullmatch(r"  command line: --([\w.]+)=.*?: (\D.*?)(; e\.g\. .*)", line):
                said.setdefault(found[1], {found[3]: []}).setdefault(found[2], []).append(value)
    return {key: [f"{', '.join(values)}: {what}" for what, values in of_key.items()] for key, of_key in said.items()}


def edge_notes(line: str) -> list[str]:
    """The notes on options without their dashes, on a machine with a GPU."""
    notes = cli.parse([f"--{word}" for word in line.split()], elsewhere=True, world_size=1, n_gpus=1).loaded.notes
    return [what for note in notes for what in note.removeprefix("without effect: ").split("; ")]


def test_the_rules_of_each_key_and_the_notes_on_values_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("meta.json", "tokenizer.json"):
        write(tmp_path / "prepared" / name, "{}")
    needs = dict[str, list[str]]()
    for key, rule in schema.usage_rules():
        needs.setdefault(key, []).append(f"{rule.needs} ({rule.decided_by})")
    found: dict[str, Any] = {
        "keys": {key: f"{schema.type_name(key)}: {rule_of(key)}" for key in schema.known_keys()},
        "needed": {key: [*dict.fromkeys(rules)] for key, rules in needs.items()},
        "refused": refused_values(),
        "notes": {" ".join(argv): "; ".join(loaded(*argv).notes).split("; ") for argv in UNUSED},
        "edges": {line: edge_notes(line) for keys, rest in EDGES.items() for line in (f"{keys} {one}" for one in rest)},
    }
    assert not [key for key in needs if f": {key} = " not in str(found["notes"])]
    assert_recorded(found, HERE / "recorded_keys.json")


FILES = {  # a base is next to its file, else in the working directory; editors on Windows write a byte order mark
    "base.toml": '[data]\npath = "x"\n[optim]\nname = "muon"\nmuon_momentum = 0.8\n[model]\nfamily = "gpt"\n'
    "rope_theta = 5e5\nn_layers = 3\ndim = 64\n[train]\nsteps = 50\nseq_len = 64\n",
    "size.toml": "[train]\nseq_len = 7\n",
    "configs/size.toml": '\ufeffbase = "base.toml"\n[model]\nsize = "10M"\n',
    "configs/gr\u00fcn.toml": 'base = "size.toml"\n[model]\nn_heads = 10\n[data]\npath = ""\n[train]\nsteps = 60\n',
}


def test_what_a_check_of_a_config_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer of each value; keys without effect in one note, and those that a size replaces. No folder is left."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        write(tmp_path / name, text)
    found = {}
    for more in (
        ["--eval.every=0", "--eval.samples=128", "--train.micro_batch_size=3", "--mixed-precision"],
        ["--optim.name=adamw", "--eval.samples=9", "--run.name=b"],
    ):
        for mode in ("--check-config", "--print-config"):
            assert train.main([mode, f"--config={name}", *more]) == 0
            lines = [line for line in capsys.readouterr().out.splitlines() if not line.endswith("# default")]
            found[" ".join([mode, *more])] = [" ".join(line.split()) for line in lines if line]
    assert {file.name for file in tmp_path.iterdir()} == {"base.toml", "size.toml", "configs"}
    assert_recorded(found, HERE / "recorded_checks.json")
