"""Each key that a resume keeps, because it decides what a run learns, does change what a run learns.

And to what it changes it: key_effects.json has the losses. They stay the same until somebody means to change them. A
key that is said to have no effect has none.

Nothing else holds: the losses and sums of weights of these values; read their diffs. In the shapes of test_parity.py
they are those of transformers, and the tests in tests/optim compare optimizers with formulas.
"""

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import train
from tests.config.parsing import parse
from tests.helpers import options, run_distributed, tiny
from tests.recorded import assert_recorded
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import known_keys, resume_rule, unused_keys
from torchtitan_lite.data import token_files
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.optim.average import averaged
from torchtitan_lite.run import run_folder, start_and_end
from torchtitan_lite.run.metrics import Log

MOE = {"model.family": "qwen3_moe", "model.n_experts": 4, "model.hidden_dim": 16}
T5 = {"model.family": "t5", "data.objective": "span_corruption"}
PAIRS = {"data.objective": "pairs", "data.source_key": "text", "data.target_key": "head", "data.target_len": 4}
ROPE = {"model.rope_factor": 4.0, "model.rope_original_max_seq_len": 8}
WSD, STEPS = {"optim.schedule": "wsd"}, {"optim.schedule": "step", "optim.step_every": 1}
MUON = {"optim.name": "muon"}
# the key, another value than that of the run beside it, and what both runs have to set for the key to be used
ROWS: list[tuple[str, Any, dict[str, Any]]] = [
    ("run.seed", 1, {}),
    ("model.family", "gpt", {}),
    ("model.vocab_size", 600, {}),
    ("model.dim", 48, {}),
    ("model.n_layers", 1, {}),
    ("model.n_decoder_layers", 1, T5),
    ("model.n_heads", 4, {}),
    ("model.tie_embeddings", True, {}),
    ("model.dropout", 0.2, {"model.family": "gpt"}),
    ("model.n_kv_heads", 1, {}),
    ("model.head_dim", 8, {}),
    ("model.hidden_dim", 40, {}),
    ("model.n_experts", 8, MOE),
    ("model.experts_per_token", 1, MOE),
    ("model.norm_topk_prob", False, MOE),
    ("model.router_bias", True, MOE),
    ("model.gated", False, T5),
    ("model.scale_output", True, T5),
    ("model.mup_base_dim", 16, {}),
    ("model.norm_eps", 0.1, {}),
    ("model.qk_norm", False, {}),
    ("model.qkv_bias", True, {}),
    ("model.rope_theta", 50.0, {}),
    ("model.rope_factor", 2.0, ROPE),
    ("model.rope_low_freq_factor", 2.0, ROPE),
    ("model.rope_high_freq_factor", 8.0, ROPE),
    ("model.rope_original_max_seq_len", 16, ROPE),
    ("model.window", 4, {"model.family": "mistral"}),
    ("model.layer_pattern", "full,window", {"model.family": "gemma3", "model.window": 4}),
    ("model.window_rope_theta", 50.0, {"model.family": "gemma3", "model.window": 4}),
    ("data.packing", "best_fit", {}),
    ("data.document_mask", True, {}),
    ("data.objective", "pairs", PAIRS | {"data.objective": "causal"}),
    ("data.noise_density", 0.4, T5),
    ("data.mean_span_length", 1.5, T5),
    ("data.target_len", 3, PAIRS),
    ("data.blind_source", True, PAIRS),
    ("data.skip_samples", [[1, 3]], {}),
    ("train.seq_len", 16, {}),
    ("train.global_batch_size", 8, {}),
    ("train.batch_schedule", [[0, 8]], {}),
    ("train.z_loss", 0.1, {}),
    ("train.router_aux_loss", 1.0, MOE),
    ("train.router_z_loss", 1.0, MOE),
    ("train.router_bias_rate", 10.0, MOE | {"model.router_bias": True}),
    ("optim.name", "sgd", {}),
    ("optim.lr", 1e-3, {}),
    ("optim.betas", [0.5, 0.6], {}),
    ("optim.eps", 0.1, {}),
    ("optim.muon_momentum", 0.5, MUON),
    ("optim.muon_embedding_lr_factor", 9.0, MUON),
    ("optim.weight_decay", 0.9, {}),
    ("optim.freeze", ["tok_embeddings.*"], {}),
    ("optim.groups", "[{match = '*norm*', lr_factor = 9.0}]", {}),
    ("optim.schedule", "constant", {}),
    ("optim.warmup_steps", 2, {}),
    ("optim.decay_ratio", 0.6, WSD),
    ("optim.min_lr_ratio", 0.9, {}),
    ("optim.step_gamma", 0.9, STEPS),
    ("optim.step_every", 2, STEPS),
    ("optim.ema_decay", 0.5, {}),
    ("optim.max_norm", 0.01, {}),
]


IDLE = ", and other values of all keys without effect"  # and the device that is chosen
# what is only recorded
MORE: dict[str, dict[str, Any]] = {
    **{family: {"model.family": family} for family in FAMILIES if not FAMILIES[family].encoder_decoder},
    "a dropout mask for each micro-batch": {"model.family": "gpt", "model.dropout": 0.2, "train.micro_batch_size": 1},
    "mup, gpt": {"model.family": "gpt", "model.mup_base_dim": 16},
    "mup, Muon": MUON | {"model.mup_base_dim": 16},
    "Muon, gpt": MUON | {"model.family": "gpt"},
    "Muon, experts": MUON | MOE,
    "linear": {"optim.schedule": "linear", "train.steps": 4},
    "cosine": {"train.steps": 4},
    "not clipped": {"optim.max_norm": 1e9, "optim.lr": 0.1},
    "averages of Muon": MUON | {"optim.ema_decay": 0.5},
    "best fit within documents, windows": {
        **{"data.packing": "best_fit", "data.document_mask": True, "model.family": "mistral", "model.window": 5},
    },
    "pairs, t5": PAIRS | {"model.family": "t5", "data.target_len": 5, "data.blind_source": False},
    "third epoch": {"train.global_batch_size": 400, "train.micro_batch_size": 40, "train.seq_len": 16},
}


def test_each_key_that_a_resume_keeps_changes_what_a_run_learns(tmp_path: Path) -> None:
    rules = {key: resume_rule(key) for key in known_keys()}
    kept = {key for key, rule in rules.items() if rule.rule in ("fork", "refused") and rule.changes != "content"}
    assert kept - {key for key, *_ in ROWS} == {
        "model.init_from",  # weights
        "model.max_seq_len",  # rows that are unused
        "train.phases",  # test_phases.py
    }
    chance = random.Random(7)
    words = ["".join(chance.choices("aeinorstu", k=chance.randint(2, 7))) for _ in range(300)]
    documents = (chance.choices(words, range(300), k=5 + i % 9) for i in range(500))
    lines = [json.dumps({"text": " ".join(document), "head": " ".join(document[-4:])}) for document in documents]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    bases = {", ".join(options(used)): used for _, _, used in ROWS}
    runs = bases | {f"{key} = {value}": used | {key: value} for key, value, used in ROWS} | MORE
    common = {"model__family": "llama", "train__steps": 3, "optim__warmup_steps": 1}
    common |= {"train__global_batch_size": 4, "train__micro_batch_size": 4}  # the fewest forward passes
    shared = tiny(tmp_path / "text.jsonl", tmp_path, **common)
    for name, used in (bases | {"optim.name = sgd": {"optim.name": "sgd"}}).items():
        config = parse(*shared, *options(used)).config
        idle = unused_keys(config).keys() - used.keys()
        idle -= {"model.mup_base_dim"}  # refused
        runs[f"{name}{IDLE}"] = used | {key: value for key, value, _ in ROWS if key in idle} | {"run.device": "auto"}
    (tmp_path / "default/stacks").mkdir(parents=True)
    (found,) = run_distributed(learned, 1, {name: [*shared, *options(values)] for name, values in runs.items()})
    equal = [key for key, value, used in ROWS if found[f"{key} = {value}"] == found[", ".join(options(used))]]
    assert equal == []
    assert [name for name in found if IDLE in name and found[name] != found[name.removesuffix(IDLE)]] == []
    steps = {name: [*steps, sum(map(abs, weights))] for name, (steps, weights) in found.items() if IDLE not in name}
    assert_recorded(steps, Path(__file__).with_name("key_effects.json"), rel=5e-5)


def learned(process: Process, runs: dict[str, list[str]]) -> dict[str, tuple[list[float], list[float]]]:
    """The losses and gradient norms of each run's steps, and the sum of each weight, or of its average."""
    found = {}
    vars(token_files)["changed"] = lambda *_: []  # a tenth of the time
    for name, argv in runs.items():
        loaded, data = start_and_end.prepared(parse(*argv))
        config = loaded.config
        session = train.build(config, data, process, Log(config.folder, enabled=False))
        steps = [train.train_step(session, step) for step in range(1, config.train.steps + 1)]
        passes = -(-config.train.batch_size(config.train.steps) // config.train.micro_batch_size)
        assert session.watchdog._at == (0, 1, passes), "it computes"
        assert session.preemption._joining == config.folder / run_folder.JOINING
        with averaged(session.optimizer) if config.optim.ema_decay else contextlib.nullcontext():
            weights = [parameter.sum().item() for parameter in session.model.parameters()]
        found[name] = [value.item() for step in steps for value in (step.loss, step.grad_norm)], weights
        session.close()
    return found
