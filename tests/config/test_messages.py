"""Each mistake in a config has a message with what works; all are found at once, before any process group.

Nothing else holds: the words of most messages, which of them come together, and what a machine lacks ("without ...",
"$CXX"); read their diffs. The tests below hold that a rule has a message, and that what a message offers works.
"""

import ast
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from tests.config.parsing import PAIRS, T5, only_built_in, write
from tests.helpers import ROOT
from tests.recorded import assert_recorded
from torchtitan_lite import hints
from torchtitan_lite.checkpointing.compatibility import saved_config
from torchtitan_lite.checkpointing.storage import require_equal
from torchtitan_lite.config import cli
from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.rules import local
from torchtitan_lite.config.schema import Config, flatten, known_keys
from torchtitan_lite.errors import ConfigError, UserError

RECORDED = Path(__file__).with_name("recorded_messages.json")

INVALID: list[list[str]] = [
    ["--model.dim=30", "--model.n_heads=4"],
    ["--optim.warmup_steps=500", "--train.steps=50"],
    ["--optim.betas=[0.9, 1.0]"],
    ["--fsdp.dp_shard=0"],
    ["--fsdp.dp_replicate=3"],
    ["--run.device=cuda"],
    ["--run.name=a/b"],
    ["--run.name=.."],
    ["--run.name="],
    ["--data.path=no/such/text"],
    ["--model.size=9M"],
    ["--model.n_kv_heads=3"],
    ["--model.head_dim=33"],
    ["--optim.schedule=wsd", "--optim.warmup_steps=700"],
    ["--optim.schedule=wsd", "--optim.decay_ratio=0.95", "--optim.warmup_steps=800"],
    ["--optim.muon_momentum=0"],
    ["--train.batch_schedule=[[5, 8], [0, 4]]"],
    ["--train.batch_schedule=[[5, 8], [5, 4]]"],
    ["--train.batch_schedule=[[-1, 8]]"],
    ["--train.batch_schedule=[[1, 0]]"],
    ["--train.batch_schedule=[[1, 2147483648]]"],
    ["--tokenizer.path=no.json"],
    ["--optim.name=adafactor"],
    ["--model.family=mamba"],
    ["--model.layer_pattern=delta,full"],
    ["--optim.name=3"],
    ["--optim.groups=[{lr_factor = 2.0}]"],
    ["--optim.groups=[{match = '*', rate = 2.0}]"],
    ["--checkpoint.api=pickle"],
    ["--train.steps=true"],
    ["--config", "configs/no_such.toml"],
    ["--eval.evry=3"],
    ["--optim.lr=inf"],
    ["--fsdp.param_dtype=float8"],
    ["--fsdp.reshard_after_forward=1"],
    ["--fsdp.reshard_after_forward=never"],
    ["--fsdp.reshard_after_forward=2"],
    ["--fsdp.dp_replicate=0"],
    ["--fsdp.sharding_strategy=ZERO"],
    ["--fsdp.sharding_strategy=FULL_SHARD", "--fsdp.reshard_after_forward=false"],
    ["--fsdp.sharding_strategy=NO_SHARD", "--fsdp.dp_shard=2"],
    ["--fsdp.grad_sync=all_reduce_last"],
    ["--fsdp.cpu_offload"],
    ["--fsdp.reduce_scatter_buffers=0"],
    ["--fsdp.comm_memory=symmetric"],
    ["--fsdp.comm_memory=pool"],
    ["--fsdp.param_dtype=float16", "--grad_scaler.init_scale=0.5"],
    ["--fsdp.param_dtype=float16", "--grad_scaler.init_scale=1e39"],
    ["--speed.float8"],
    ["--speed.float8", "--fsdp.shard_columns=*.wq.weight"],
    ["--speed.float8", "--train.seq_len=66", "--train.micro_batch_size=2"],
    ["--speed.float8", "--fsdp.cpu_offload"],
    ["--fsdp.precision_overrides=[{param_dtype = 'float32'}]"],
    ["--fsdp.precision_overrides=[{match = '*', param_dtype = 'int8'}]"],
    ["--optim.betas=[nan,1.0]"],
    ["--optim.betas=[0.9]"],
    ["--train.batch_schedule=[[0,8.5]]"],
    ["--data.sources={nowhere = 1.0}"],
    ["--data.sources={a = 0.0}"],
    ["--data.sources={a = -1.0}"],
    ["--run.timeout_minutes=1e12"],
    ["--model.n_layers=1000000000"],
    ["--model.family=qwen3_moe", "--model.n_experts=4", "--model.experts_per_token=5"],
    ["--model.mup_base_dim=64", "--model.tie_embeddings"],
    ["--model.mup_base_dim=64", "--optim.name=sgd"],
    [*T5, "--fsdp.reduce_dtype=float16"],
    [*T5, "--fsdp.param_dtype=float16"],
    ["--model.family=t5", "--model.size=t5-huge"],
    [*T5, "--model.tie_embeddings"],
    [*PAIRS, *T5[:1], "--data.target_len=2000"],
    ["--model.init_from=no/such"],
    T5[:1],
    ["--data.objective=span_corruption"],
    [*T5, "--train.seq_len=2"],
    [*T5, "--data.packing=best_fit"],
    [*T5, "--data.document_mask"],
    ["--data.skip_samples=[[8, 8]]"],
    ["--data.skip_samples=[[8, 12], [10, 16]]"],
    ["--data.skip_samples=[[-1, 4]]"],
    *(["--data.skip_samples=[[8]]"], ["--data.skip_samples=[[1, 2, 3]]"]),
    ["--optim.schedule=wsd", "--optim.decay_ratio=0.95", "--optim.warmup_steps=500", "--train.steps=50"],
    ["--data.sources={a = 1.0}", "--data.path=b"],
    [*PAIRS, "--data.target_len=0"],
    [*PAIRS, "--data.target_key=a"],
    ["--data.objective=pairs", "--data.target_len=8", "--data.source_key=a"],
    ["--data.objective=pairs", "--data.target_len=8", "--data.source_prefix=a"],
    [*PAIRS, "--train.seq_len=1000", "--data.target_len=100"],
    ["--data.objective=pairs", "--data.target_len=many"],
    [*PAIRS, "--train.seq_len=2000"],
    ["--profile.steps=[12, 10]"],
    ["--profile.steps=[1, 2, 3]"],
    ["--checkpoint.resume=no/such"],
    ["--train.seq_len=2048"],
    ["--train.epochs=1", "--train.batch_schedule=[[0, 8], [10, 16]]"],
    ["--eval.every=epoch", "--checkpoint.every=epoch", "--train.batch_schedule=[[0, 8], [10, 16]]"],
    ["--train.phases=[{from_step=9,train.seq_len=16}]", "--eval.every=epoch"],
    ["--train.phases=[{from_step=9,train.global_batch_size=2}]", "--train.batch_schedule=[[0, 8], [10, 16]]"],
    ["--train.phases=[{from_step=9,optim.lr=1},{from_fraction=0.01,optim.lr=2}]"],
    ["--train.phases=[{from_step=9,optim.lr=1},{from_step=10,optim.weight_decay=2}]"],
    ["--train.phases=[{from_step=9,optim.lr=1},{from_step=9,optim.lr=2}]"],
    ["--train.phases=[{from_step=9,optim.lr=1}]", "--train.steps=9"],
    [
        "--train.phases=[{from_step=9,optim.lr=1},{from_step=10,train.global_batch_size=2}]",
        "--train.batch_schedule=[[0, 8], [10, 16]]",
    ],
    ["--train.phases=[{from_fraction=0.0005,optim.lr=1}]"],
    ["--train.phases=[{from_step=9,from_fraction=0.5}]"],
    ["--train.phases=[{from_step=9,optim.lr=1},{optim.lr=2}]"],
    ["--train.phases=[{from_fraction=1.0,optim.lr=1}]"],
    ["--train.phases=[{from_step=9.5,optim.lr=1}]"],
    [
        "--train.phases=[{from_step=9,train.seq_len=2048,optim.lr=1e-3},{from_step=10,model.window=8}]",
        "--model.family=gpt",
    ],
    ["--train.phases=[{from_step=9,train.seq_len=0}]"],
    ["--train.phases=[{from_step=9,seq_len=8}]"],
    ["--eval.every=often"],
    ["--fsdp.sharding_strategy=SHARD_GRAD_OP", "--fsdp.reshard_after_forward=2"],
]
MISSPELLED: list[list[str]] = [
    ["--steps=50"],
    ["--name=x"],
    ["--lr=1e-3"],
    ["--path=x"],
    ["--every=3"],
    ["--batch_size=3"],
    ["--wandb"],
    ["--dry_run"],
    ["--world_size=64"],
    ["--nproc-per-node", "4"],
    ["--gpus-per-node=8"],
    ["config=x.toml"],
    ["configs/debug.toml"],
    ["train.steps=5"],
    ["--log.trackers=wandb,tensorbord"],
    ["--optim.name=adamww"],
    ["--fsdp.sharding_strategy=shard_grad"],
    ["--train.stepz", "400"],
    ["--optim.grups=[{match = '*'}]"],
    ["--optim.steps=3"],
    ["--optim.seed=4"],
    ["--profiler.steps=4"],
    ["--optim.groups=[{match = 'layers.0.*'}, {match = '*', lr_factr = 1}]"],
    ["--optim.groups=3"],
    ["--profile.steps=ten"],
    ["--eval.every=9223372036854775808"],
    ["--mixed-precision", "--fsdp.param_dtype=float16"],
]
ON_RANKS: list[tuple[list[str], int, int]] = [
    (["--fsdp.reshard_after_forward=3"], 8, 0),
    (["--fsdp.shard_columns=*.w1.weight", "--fsdp.reshard_after_forward=2"], 8, 0),
    (["--speed.float8", "--fsdp.reshard_after_forward=2"], 8, 8),
    (["--fsdp.cpu_offload", "--fsdp.dp_replicate=2"], 8, 8),
    (["--fsdp.cpu_offload"], 8, 8),
    (["--fsdp.comm_memory=pool", "--run.device=cpu"], 2, 2),
    (["--fsdp.dp_replicate=2", "--fsdp.dp_shard=3"], 8, 0),
    (["--fsdp.reshard_after_forward=8"], 8, 0),
    (["--fsdp.dp_replicate=2", "--fsdp.reshard_after_forward=4"], 12, 0),
    (["--fsdp.cpu_offload", "--optim.name=adamw", "--run.device=cpu"], 1, 1),
    (["--fsdp.grad_sync=all_reduce_last", "--fsdp.dp_replicate=8"], 8, 0),
    (["--fsdp.grad_sync=all_reduce_last", "--fsdp.dp_shard=8"], 8, 0),
]
FOLDERS = {  # of the files below
    "base.toml": "[fsdp]\ndp_shard = 7\n[model]\nmax_seq_len = 999\n",
    "bad.toml": 'base = "base.toml"\nextra = 1\n[train]\nstep = 10\nsteps = "many"\n[optim]\nlr = -1.0\nbetas = [0.9]\n'
    "[modell]\ndim = 3\n",
    "x.toml": 'base = "gone.toml"\n[train]\nsteps = 2.5\n',
    "list.toml": "base = ['a.toml']\n",
    "damaged.toml": "[train]\nsteps = \n",
    "notes.md": "some text",
    "include/Python.h": "",
    **dict.fromkeys(("prepared/meta.json", "prepared/tokenizer.json"), "{}"),
    "saved/x.toml": 'base = "gone.toml"',
    "saved/config.toml": '[model]\ninit_from = "gone"\n',  # a run that has a checkpoint
    "saved/checkpoints/step-5": "",
    "begun/config.toml": '[model]\ninit_from = "gone"\n',  # one that was killed in its first save
    "begun/checkpoints/.tmp-step-5": "",
    "text[1].md": "",
    "sub/good.toml": '\ufeffbase = "~/below.toml"\n[train]\nsteps = 5\n[[phases]]\nfrom_step = 2\noptim.lr = 1e-3\n',
    "below.toml": "[train]\nsteps = 3\n",
    "of_this_folder.py": "from examples.own_tracker import TABLE",
}
MACHINES: list[tuple[list[str], int, int, int]] = [  # the same, with the processes of this machine
    ([], 8, 2, 4),
    (["--run.device=cpu"], 8, 2, 4),
    ([], 8, 4, 4),
    (["--speed.float8", "--mixed-precision", *T5], 1, 1, 1),
    (["--speed.float8", "--mixed-precision", "--fsdp.precision_overrides=[{match='*',param_dtype='fp32'}]"], 1, 1, 1),
]
FILES = [
    ["--model.family=mamba", "--model.size=7B"],
    ["--model.family=own:TYPO", "--model.size=124M"],
    *(["--check"], ["--dcp"], ["--conf", "good.toml"], ["--train.step=5"]),
    ["--model.mup_base_dim=64", "--model.tie_embeddings", "--optim.name=sgd"],
    ["--config", "bad.toml", "--train.seq_len=4096", "stray", "--dcp-apj"],
    *(["--config", f"{name}.toml"] for name in ("x", "saved/x", "list", "damaged", "latin", "none")),
    ["--data.path=['prepared', 'notes.md']", "--fsdp.dp_shard=2"],
    ["--run.out_dir=.", "--run.name=prepared", "--checkpoint.resume=~/prepared"],
    ["--run.out_dir=~", "--run.name=prepared", "--checkpoint.resume=prepared"],
    ["--run.out_dir=~", "--run.name=begun", "--model.init_from=gone"],
]
CHECKED = [  # by train.py on the first of eight ranks
    *(
        [f"--{key}".format(pattern)]
        for key in ("optim.freeze={!r}", "optim.groups=[{{match = {!r}}}]")
        for pattern in ("layer.0.*", "tok_embedding.*", "layers.1.atention.*")
    ),
    ["--optim.freeze=*,norm.*"],
    ["--optim.freeze=norms.*,layer.0.*"],
    ["--fsdp.precision_overrides=[{match = 'layers.9.*', param_dtype = 'bf16'}]"],
    ["--model.dim=36", "--model.n_heads=6", "--model.n_kv_heads=2", "--fsdp.shard_columns=*.w1.weight"],
    ["--fsdp.shard_columns=*.wq"],
    ["--data.path=include"],
    ["--data.path=.", "--data.text_suffixes=.md"],
    ["--data.text_suffixes=md,.csv,.gz,.a/b"],
    ["--train.phases=[{from_step=9,data.sources={include=1.0}}]"],
    # a refused key of [model], of each kind, ends the checks that build the model; another key does not
    *(
        [f"--{refused}", "--optim.freeze=layer.0.*"]
        for refused in (
            *("model.dim=0", "model.dmi=48", "model.size=9M", "model.family=own:TYPO", "model.n_kv_heads=3"),
            *("optim.lr=-1", "train.stepz=3"),
        )
    ),
]

ALLOWED: dict[str, tuple[int, ...]] = {  # next to a mistake; machines as below, if not (1, 0, 1)
    # [run]
    "--run.name=... --run.preempted_exit_code=3": (),
    "--run.preempted_exit_code=125 --run.threads=4096 --run.seed=9223372036854775807": (),
    "--run.timeout_minutes=525600 --run.start_timeout_minutes=525600 --run.preempted_exit_code=0": (),
    "--run.device=cuda": (1, 1, 1),
    "--run.device=CUDA --run.seed=0": (8, 4, 4),
    "--run.device=auto": (4, 0, 4),
    "--run.device=cpu": (8, 2, 4),
    # [model]
    "--model.dim=36 --model.n_heads=6": (),
    "--model.dim=30 --model.n_heads=4 --model.head_dim=2": (),
    "--model.dim=192 --model.n_heads=6 --model.n_kv_heads=3": (),
    "--model.family=gpt --model.n_kv_heads=3": (),
    "--model.family=gpt --model.dim=30 --model.n_heads=2 --model.mup_base_dim=64 --model.tie_embeddings=false": (),
    "--model.family=t5 --data.objective=span_corruption --model.head_dim=33 --model.n_kv_heads=3": (),
    "--model.family=QWEN3_MOE --model.size=1M --model.n_experts=4 --model.experts_per_token=4": (),
    "--model.family=olmoe --model.n_experts=2147483647 --model.experts_per_token=2147483647": (),
    "--model.experts_per_token=9": (),
    "--model.family=olmo_hybrid --model.layer_pattern=delta,full": (),
    "--model.layer_pattern=full,NOPE,window --model.window=1": (),
    "--model.mup_base_dim=64 --optim.name=adamw": (),
    "--model.mup_base_dim=64 --optim.name=muon": (),
    "--optim.schedule=wsd --optim.decay_ratio=0.9 --train.steps=1000 --optim.warmup_steps=100": (),
    "--optim.schedule=wsd --optim.decay_ratio=1": (),
    "--optim.schedule=wsd --optim.decay_ratio=0.9 --train.steps=100": (),
    "--model.tie_embeddings --optim.name=sgd": (),
    "--model.dim=1 --model.n_layers=1 --model.n_heads=1 --model.head_dim=2 --model.hidden_dim=1 --model.dropout=0": (),
    "--model.n_layers=2048 --model.n_decoder_layers=2048 --model.hidden_dim=16777216 --model.vocab_size=2147483647": (),
    "--model.dim=1048576 --model.n_heads=1048576 --model.n_kv_heads=1048576 --model.head_dim=1048576": (),
    "--model.max_seq_len=2147483647 --train.seq_len=2147483647 --model.window=2147483647": (),
    "--model.mup_base_dim=1048576 --model.rope_factor=1 --model.rope_original_max_seq_len=2147483647": (),
    "--model.rope_factor=2 --model.rope_original_max_seq_len=1 --model.rope_low_freq_factor=1e-9": (),
    "--model.family=t5 --data.objective=span_corruption --model.tie_embeddings --model.scale_output": (),
    "--model.family=t5 --data.objective=span_corruption --model.tie_embeddings --model.init_from=notes.md": (),
    "--model.family=t5 --data.objective=span_corruption --model.size=t5-small": (),
    "--model.family=t5 --data.objective=span_corruption --mixed-precision --fsdp.output_dtype=bf16": (),
    "--fsdp.param_dtype=fp16 --fsdp.reduce_dtype=FLOAT16 --grad_scaler.init_scale=1": (),
    "--fsdp.output_dtype=float16 --grad_scaler.init_scale=1267650600228229401496703205376": (),
    "--run.out_dir=. --run.name=saved --model.init_from=gone --optim.lr=1e-4 --checkpoint.resume=lost": (),
    "--run.out_dir=~ --run.name=saved --model.init_from=gone": (),
    "--run.out_dir=. --run.name=saved --model.init_from=notes.md": (),
    # [tokenizer] and [data]
    "--model.vocab_size=4096": (),
    "--model.vocab_size=257 --tokenizer.vocab_size=257": (),
    "--tokenizer.vocab_size=2147483647": (),
    "--model.vocab_size=1 --tokenizer.path=notes.md": (),
    "--model.vocab_size=1 --data.path=prepared": (),
    "--model.vocab_size=1 --data.sources={prepared=0.5,'notes.*'=1e-9}": (),
    "--data.path=notes.md,*.toml,text[1].md": (),
    "--data.path=notes.md --train.phases=[{from_step=9,data.sources={'notes.md'=1.0}}]": (),
    "--data.packing=best_fit --data.document_mask --data.target_len=2000 --train.seq_len=1024": (),
    "--model.family=t5 --data.objective=span_corruption --train.seq_len=3 --data.packing=concat": (),
    "--model.family=t5 --data.objective=span_corruption --data.noise_density=0.5 --data.mean_span_length=1": (),
    "--data.skip_samples=[[0,1],[1,2],[8,12]]": (),
    "--data.objective=pairs --data.target_len=1 --data.document_mask=false": (),
    "--data.objective=pairs --data.target_len=24 --train.seq_len=1000 --data.source_key=a --data.target_key=b": (),
    "--data.objective=pairs --data.target_len=8 --data.source_key=a --data.target_key=b --data.source_prefix=c": (),
    "--data.objective=pairs --data.target_len=1024 --train.seq_len=1024 --model.family=t5": (),
    "--data.objective=pairs --data.target_len=2147483647 --model.max_seq_len=2147483647 --model.family=t5": (),
    "--data.source_key=a --data.target_key=a": (),
    # [train] and [optim]
    "--train.seq_len=1 --model.max_seq_len=1 --train.micro_batch_size=1 --train.steps=1": (),
    "--train.max_skipped=1 --train.global_batch_size=1 --train.on_nonfinite=Skip": (),
    "--train.steps=1000000000000 --train.micro_batch_size=2147483647 --train.global_batch_size=2147483647": (),
    "--train.epochs=1 --train.batch_schedule=[[0,16],[1,16]] --optim.warmup_steps=5000 --eval.every=epoch": (),
    "--train.epochs=1000000 --train.batch_schedule=[[5,8]] --sample.every=EPOCH": (),
    "--train.batch_schedule=[[0,1],[1,2147483647]] --optim.schedule=cosine --eval.every=9223372036854775807": (),
    "--train.batch_schedule=[[5,16]] --optim.schedule=step --optim.step_every=1 --train.epochs=0": (),
    "--optim.warmup_steps=49 --train.steps=50": (),
    "--optim.warmup_steps=50 --train.steps=100 --optim.schedule=wsd --optim.decay_ratio=0.5": (),
    "--optim.warmup_steps=90 --train.steps=100 --optim.decay_ratio=0.5": (),
    "--optim.warmup_steps=0 --optim.schedule=WSD --optim.decay_ratio=1 --optim.min_lr_ratio=1": (),
    "--train.steps=20 --optim.schedule=wsd": (),
    "--optim.schedule=step --optim.step_gamma=1 --optim.ema_decay=0 --optim.max_norm=inf --optim.betas=0,0.99": (),
    "--optim.min_lr_ratio=0 --optim.weight_decay=0 --optim.muon_embedding_lr_factor=0 --optim.lr=1e-30": (),
    "--optim.groups=[{match='*',lr_factor=0,weight_decay=0.0}] --optim.freeze=layers.[0,1].*": (),
    "--train.z_loss=0 --train.router_aux_loss=0 --train.router_z_loss=0 --model.family=olmoe": (),
    "--train.router_bias_rate=0 --model.router_bias --model.family=olmoe --model.n_experts=1 "
    "--model.experts_per_token=1": (),
    "--spike.action=log --spike.window=4 --spike.loss_deviations=0": (),
    "--spike.action=Skip --spike.window=10000 --spike.norm_deviations=0 --train.on_nonfinite=skip": (),
    # [fsdp]
    "--fsdp.dp_replicate=2": (8, 0, 1),
    "--fsdp.dp_shard=2": (8, 0, 1),
    "--fsdp.dp_replicate=2 --fsdp.dp_shard=4 --fsdp.reshard_after_forward=2": (8, 0, 1),
    "--fsdp.dp_replicate=8 --fsdp.dp_shard=-1 --fsdp.grad_sync=last": (8, 0, 1),
    "--fsdp.reshard_after_forward=4": (8, 0, 1),
    "--fsdp.reshard_after_forward=3": (6, 0, 1),
    "--fsdp.shard_columns=*.w1.weight --fsdp.reshard_after_forward=true": (8, 0, 1),
    "--fsdp.shard_columns=*.w1.weight --fsdp.reshard_after_forward=default": (8, 0, 1),
    "--fsdp.grad_sync=all_reduce_last --fsdp.dp_replicate=2": (4, 0, 1),
    "--fsdp.cpu_offload --optim.name=adamw": (8, 8, 8),
    "--fsdp.cpu_offload --optim.name=sgd --run.device=cuda --fsdp.dp_replicate=1": (1, 1, 1),
    "--fsdp.cpu_offload=false --fsdp.dp_replicate=2": (2, 2, 2),
    "--fsdp.comm_memory=symmetric": (2, 2, 2),
    "--fsdp.sharding_strategy=full_shard --fsdp.reshard_after_forward=true --fsdp.dp_replicate=1": (4, 0, 4),
    "--fsdp.sharding_strategy=FULL_SHARD --fsdp.reshard_after_forward=default --fsdp.dp_replicate=-1": (4, 0, 4),
    "--fsdp.sharding_strategy=SHARD_GRAD_OP --fsdp.reshard_after_forward=false --fsdp.dp_shard=4": (4, 0, 4),
    "--fsdp.sharding_strategy=HYBRID_SHARD": (8, 0, 4),
    "--fsdp.sharding_strategy=HYBRID_SHARD --fsdp.dp_replicate=4": (8, 0, 4),
    "--fsdp.sharding_strategy=_HYBRID_SHARD_ZERO2 --fsdp.dp_shard=2": (8, 0, 4),
    "--fsdp.sharding_strategy=NO_SHARD --fsdp.dp_shard=1 --fsdp.dp_replicate=4": (4, 0, 4),
    "--fsdp.sharding_strategy= --fsdp.blocks_per_group=1 --fsdp.reduce_scatter_buffers=1": (),
    "--fsdp.explicit_prefetching --fsdp.forward_prefetch=1 --fsdp.backward_prefetch=1": (),
    # [speed], [compile] and [activation_checkpointing]
    "--speed.float8 --mixed-precision --train.seq_len=72 --train.micro_batch_size=2": (),
    "--speed.float8 --mixed-precision --train.seq_len=33 --train.micro_batch_size=16": (),
    "--speed.float8 --mixed-precision --data.objective=pairs --data.target_len=5 --train.seq_len=33 "
    "--train.micro_batch_size=2": (),
    "--speed.float8 --mixed-precision --model.family=t5 --data.objective=span_corruption "
    "--train.micro_batch_size=16": (),
    "--speed.float8 --mixed-precision --fsdp.precision_overrides=[{match='*',reduce_dtype='float32'}]": (),
    "--speed.float8 --mixed-precision --fsdp.reshard_after_forward=false": (8, 8, 8),
    "--speed.float8=false --train.seq_len=33 --train.micro_batch_size=1 --speed.gc_every=0": (),
    "--compile.backend=eager --compile.enabled": (),
    "--compile.enabled --activation_checkpointing.mode=full --activation_checkpointing.every=1": (),
    # what a run writes
    "--log.trackers=wandb,TensorBoard --log.every=1 --profile.steps=[10,10]": (),
    "--log.every=1 --log.trackers=of_this_folder:TABLE": (),
    "--profile.steps=1,2 --sample.prompts=a,b --sample.max_tokens=1 --sample.temperature=0": (),
    "--profile.steps=[] --checkpoint.keep_latest=0 --checkpoint.every=0 --eval.samples=1 --eval.task_questions=0": (),
    "--checkpoint.keep_every=0 --grad_scaler.growth_interval=1 --eval.tasks_every=epoch --eval.every=0": (),
    "--run.out_dir=. --run.name=save --checkpoint.resume=saved": (),
    # files and shorthands
    "--config sub/good.toml": (),
    "--explicit-prefetching --dcp-api --fsdp.forward_prefetch=2 --optim.eps=.5 --fsdp.reshard_after_backward=True": (),
}


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in names, and every package and compiler."""
    only_built_in(monkeypatch)
    monkeypatch.setattr(local, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name)))
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "include"})


def notes(argv: Sequence[str], world_size: int = 1, n_gpus: int = 0, local_world_size: int = 1) -> Sequence[str]:
    """On values without effect."""
    return cli.parse(argv, world_size=world_size, n_gpus=n_gpus, local_world_size=local_world_size).loaded.notes


def message(argv: Sequence[str], *machine: int) -> str:
    """About a config that has mistakes; empty if it has none."""
    try:
        notes(argv, *machine)
    except ConfigError as error:
        return str(error).removeprefix("the configuration has 1 problem:\n  ")
    return ""


@pytest.fixture
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in FOLDERS.items():
        write(Path(name), text)


@pytest.mark.usefixtures("_in_folder")
def test_the_message_of_each_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all problems at once: files, keys, values that work, what a machine lacks, patterns and texts.

    Also the notes on what is allowed.
    """
    Path("latin.toml").write_bytes(b"# \xe4\n")
    found: dict[str, object] = {" ".join(argv): message(argv) for argv in (*INVALID, *MISSPELLED)}
    for argv, *machine in (*((*row, 1) for row in ON_RANKS), *MACHINES):
        found[f"{' '.join(argv)} on {machine}"] = message(argv, *machine)
    found["meant"] = {word: hints.nearest(word, [*known_keys(), "world-size", "per-node"]) for word in hints._MEANT}
    found["notes"] = {line: said for line, machine in ALLOWED.items() if (said := notes(line.split(), *machine))}
    found |= {" ".join(argv): sorted(message(argv, 2).splitlines()) for argv in FILES}
    monkeypatch.setenv("WORLD_SIZE", "8")
    for argv in CHECKED:
        assert train.main(["--check-config", *argv]) == 2 * ("--data.text_suffixes=.md" not in argv)
        found[f"train.py {' '.join(argv)}"] = capsys.readouterr().err
    monkeypatch.delenv("CXX", raising=False)
    lacking = {
        "shutil.which": (None, ["--compile.enabled"]),
        "sysconfig.get_paths": ({"include": "nowhere"}, ["--compile.enabled"]),
        "torchtitan_lite.config.rules.local.importlib.util.find_spec": (
            None,
            ["--compile.enabled", "--speed.float8", "--log.trackers=wandb, examples.own_tracker:TABLE,tensorboard"],
        ),
        "torchtitan_lite.config.rules.local.version": ("2.11.0", ["--fsdp.comm_memory=symmetric"]),
    }
    for name, (value, argv) in lacking.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda *_, value=value: value)
            found[f"without {name}"] = [message(argv, 1, n_gpus) for n_gpus in (0, 1)]
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setattr("shutil.which", lambda name: name if name == "g++" else None)
    found["$CXX"] = [message(["--compile.enabled"]), message(["--compile.enabled", "--compile.backend=eager"])]
    assert_recorded(json.loads(json.dumps(found).replace(str(tmp_path), "FOLDER")), RECORDED)


@pytest.mark.usefixtures("_in_folder")
def test_a_rule_refuses_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> dict[str, str]:
        found = {line: message(line.split(), *machine) for line, machine in ALLOWED.items()}
        return {line: text for line, text in found.items() if text}

    assert refused() == {}
    for name in ("shutil.which", "torchtitan_lite.config.rules.local.importlib.util.find_spec"):
        monkeypatch.setattr(name, lambda _: None)
    needs_a_package = ("--speed.float8 ", "--compile.enabled ", "--log.trackers=")
    assert list(refused()) == [line for line in ALLOWED if line.startswith(needs_a_package)]


@pytest.mark.parametrize(("argv", "world_size", "n_gpus"), [*((argv, 1, 0) for argv in INVALID), *ON_RANKS])
def test_what_a_message_offers_works(argv: list[str], world_size: int, n_gpus: int) -> None:
    def problems(*more: str) -> list[str]:
        lines = message([*argv, *more], world_size, n_gpus).splitlines()
        return [line.strip() for line in lines if not line.startswith("the configuration has")]

    offers = {line: offered(line) for line in problems()}
    left = problems(*itertools.chain(*offers.values()))
    not_offers = "unknown key", "data/web", "phase "  # the last two: the folder of an example, a value of a phase
    left = [line for line in left if not any(text in line for text in not_offers)]
    assert {line for line in left if offers.get(line, line)} == set()


def offered(line: str) -> list[str]:
    """The options of a line "... KEY = VALUE works" or "... e.g. KEY = VALUE", or of an option that it gives."""
    if option := re.search(r"e\.g\. '?(--.+?)'?$", line):
        return [option[1]]
    found = re.search(r"(?:; |e\.g\. )(\S+) = (\S+?)(?: with (\S+) = (\S+))?(?: works|$)", line)
    first, value, second, other = found.groups() if found else (None,) * 4
    return [
        f"--{known}={what}"
        for known in known_keys()
        for end, what in ((first, value), (second, other))
        if f".{known}".endswith(f".{end}")
    ]


PARTS = Registry("a.key", "docs/page.md", int, {"one": 1, "two": 2})
READ = "c: the config that it was trained with can't be read: "
NAMES = sorted(map(str, range(20)))


@pytest.mark.parametrize(("call", "expected"), [
    (lambda: PARTS.add("nosuch:X"), f"a.key: nosuch:X: No module named 'nosuch' (looked in {ROOT}, too; docs/page.md "
     "has an example)"),
    (lambda: PARTS.add("math:nosuch"), f"a.key: math:nosuch: module 'math' has no attribute 'nosuch' (looked in {ROOT}"
     ", too; docs/page.md has an example)"),
    (lambda: PARTS.add("math:pi"), "a.key: math:pi should be a int, not a float; docs/page.md has an example"),
    (lambda: PARTS.known("twoo"), "should be 'one' or 'two'; docs/page.md adds one of your own"),
    (lambda: PARTS.known("mine:Two"), "imported only if the command or its file names it: --a.key=mine:Two"),
    (lambda: saved_config(Path("c"), flatten(Config()) | {"model.dim": 0}),
     f"{READ}model.dim = 0: Input should be greater than 0"),
    (lambda: saved_config(Path("c"), flatten(Config()) | {"train.batch_schedule": [[5]]}),
     f"{READ}train.batch_schedule = [[5]]: should be pairs of a step and a batch size, by rising steps"),
    (lambda: require_equal(Path("c"), {"a": 1, "b": "x" * 64}, {"b": 3, "d": 4}, "model"), "c belongs to a different "
     "model:\n  a is 1 in the checkpoint and - here\n  b is xxxxxxxxxxxx... in the checkpoint and 3 here\n  d is - in "
     "the checkpoint and 4 here\n  go back to these values, or start a new run with --run.name=NAME"),
    (lambda: require_equal(Path("c"), dict.fromkeys(NAMES, 1), {}, "model", "advice"), "\n  ".join(["c belongs to a "
     "different model:", *(f"{n} is 1 in the checkpoint and - here" for n in NAMES[:16]), "and 4 more", "advice"])),
])  # fmt: skip
def test_a_message_as_a_whole(call: Callable[[], object], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises((UserError, ValueError)) as caught:
        call()
    assert str(caught.value) == expected


def test_the_config_of_a_checkpoint_is_read_without_the_parts_of_a_user() -> None:
    own = {"run": {"seed": 3}, "model": {"dim": 64}, "data": {"target_len": 5}, "tokenizer": {"vocab_size": 300}}
    config = Config.model_validate(own | {"train": {"steps": 9}})
    assert saved_config(Path("c"), flatten(config) | {"optim.name": "mine:LION", "log.trackers": ["mine:X"]}) == config


def test_every_rule_of_the_config_has_a_recorded_message() -> None:
    found, unrecorded = str(json.loads(RECORDED.read_text())), list[str]()
    for file in sorted((ROOT / "torchtitan_lite/config/rules").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                words = [one.value for one in ast.walk(node.value.elts[1]) if isinstance(one, ast.Constant)]
                unrecorded += [
                    str(word) for word in words if len(str(word)) > 4 and repr(word).strip('"' + "'") not in found
                ]
    assert unrecorded == []
