"""Files, `base`, overrides and their origins; and every mistake found at once, before any process group."""

from pathlib import Path

import pytest

from tests.helpers import ROOT, python, ranks, torchrun
from torchtitan_lite.config import cli, schema, toml
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tools import config_reference


def parse(*argv: str, world_size: int = 1, n_gpus: int = 0) -> toml.Loaded:
    return cli.parse(argv, world_size=world_size, n_gpus=n_gpus).loaded


def mistakes(*argv: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv, world_size=world_size)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_without_arguments_everything_is_a_default() -> None:
    loaded = parse()
    assert loaded.config.train == Config().train
    assert loaded.config.model.dim == 128  # of size "1M"


def test_file_on_base_on_size_on_defaults_and_command_line_on_top(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", '[model]\nfamily = "gpt"\nsize = "10M"\n[train]\nsteps = 50\nseq_len = 64\n')
    file = write(tmp_path / "mine.toml", 'base = "base.toml"\n[model]\nn_heads = 10\n[train]\nsteps = 60\n')
    loaded = parse("--config", str(file), "--train.micro_batch_size=3", "--mixed-precision")
    config = loaded.config
    assert (config.model.dim, config.model.n_layers, config.model.n_heads) == (320, 8, 10)
    assert (config.train.steps, config.train.seq_len, config.train.micro_batch_size) == (60, 64, 3)
    assert config.fsdp.param_dtype == "bfloat16"
    assert config.run.name == "mine"
    origins = {key: Path(origin).name for key, origin in loaded.origins.items()}
    assert origins["model.dim"] == 'size "10M"'
    assert origins["model.n_heads"] == origins["train.steps"] == "mine.toml"
    assert origins["train.seq_len"] == "base.toml"
    assert origins["train.micro_batch_size"] == "command line"
    assert origins["fsdp.param_dtype"] == "--mixed-precision"
    shown = toml.to_toml_with_origins(loaded)
    assert "steps = 60 " in shown
    assert "mine.toml" in shown


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    config = parse("--optim.betas=[0.8, 0.9]", '--data.path=["tests/*.py"]', "--optim.max_norm=inf").config
    assert config.optim.betas == (0.8, 0.9)
    for text in (toml.to_toml(config), toml.to_toml_with_origins(toml.Loaded(config, {}))):
        file = write(tmp_path / "config.toml", text)
        assert parse("--config", str(file)).config == config


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("--run.name=123", "123"),
        ("--run.name='quoted'", "quoted"),
        ("--run.out_dir=2024", "2024"),
        ("--run.deterministic", True),
        ("--run.deterministic=False", False),
        ("--optim.lr=.5", 0.5),
        ("--optim.lr=1", 1.0),
        ("--train.steps=1_000", 1000),
    ],
)
def test_values_on_the_command_line_are_parsed_by_type(argument: str, value: object) -> None:
    section, key = argument.removeprefix("--").split("=")[0].split(".")
    assert getattr(getattr(parse(argument).config, section), key) == value


def test_more_processes_than_gpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4 processes on this machine, and torch sees 2 GPUs; --nproc-per-node 2"):
        cli.parse([], world_size=8, n_gpus=2, local_world_size=4)
    assert cli.parse(["--run.device=cpu"], world_size=8, n_gpus=2, local_world_size=4)
    assert cli.parse([], world_size=8, n_gpus=4, local_world_size=4)


def test_a_value_may_follow_after_a_space() -> None:
    assert parse("--train.steps", "77").config.train.steps == 77


def test_all_problems_at_once_with_file_nearest_key_and_a_working_value(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "[fsdp]\ndp_shard = 7\n")
    file = write(
        tmp_path / "bad.toml",
        'base = "base.toml"\nextra = 1\n[train]\nstep = 10\nsteps = "many"\n[optim]\nlr = -1.0\nbetas = [0.9]\n'
        "[modell]\ndim = 3\n",
    )
    text = mistakes("--config", str(file), "--train.seq_len=4096", "--dcp-apj", "stray", world_size=2)
    for expected in (
        "10 problems",
        "command line: --dcp-apj: unknown option; the nearest known one is --dcp-api",
        "command line: stray: not understood",
        "bad.toml: extra = 1: unknown key",
        "bad.toml: [train] step = 10: unknown key; the nearest known one is train.steps, e.g. train.steps = ",
        "bad.toml: [modell] dim = 3: unknown key; the nearest known one is model.dim",
        "bad.toml: [train] steps = 'many': should be a valid integer; e.g. train.steps = ",
        "bad.toml: [optim] lr = -1.0: should be greater than 0; e.g. optim.lr = ",
        "bad.toml: [optim] betas = [0.9]",
        "base.toml: fsdp.dp_replicate = 1 x fsdp.dp_shard = 7 does not give the world size 2",
        "command line: train.seq_len = 4096 is longer than model.max_seq_len = 1024; model.max_seq_len = 4096 works",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model.dim=30", "--model.n_heads=4"], "n_heads = 3 works"),
        (["--optim.warmup_steps=500", "--train.steps=50"], "warmup_steps = 5 works"),
        (["--optim.betas=[0.9, 1.0]"], "should be in [0, 1)"),
        (["--fsdp.dp_shard=0"], "should be -1 (all remaining ranks) or at least 1"),
        (["--fsdp.dp_replicate=3"], "does not give the world size 1; fsdp.dp_replicate = 1 with fsdp.dp_shard = 1"),
        (["--run.device=cuda"], 'torch sees no GPU here; run.device = "cpu" works'),
        (["--run.name=a/b"], "should be the plain name of a folder"),
        (["--data.path=no/such/text"], "nothing found at no/such/text"),
        (["--data.path=[]"], "names no text"),
        (["--model.size=9M"], "no such size of llama; known: 1M"),
        (["--model.family=lstm"], "should be 'gpt', 'llama' or 't5'"),
        (
            ["--model.family=gpt", "--model.rope_theta=5e5"],
            'has no effect without model.family = "llama"; leave it out',
        ),
        (["--model.dropout=0.1"], 'has no effect without model.family = "gpt"'),
        (["--model.n_kv_heads=3"], "n_kv_heads = 2 works"),
        (["--model.head_dim=33"], "rotary positions need an even head_dim, not 33; head_dim = 34 works"),
        (
            ["--model.rope_factor=8", "--model.rope_low_freq_factor=4"],
            "should be below model.rope_high_freq_factor = 4.0",
        ),
        (["--optim.schedule=wsd", "--optim.warmup_steps=480"], "reaches into the decay"),
        (["--optim.momentum=0"], "should be greater than 0"),
        (
            ["--train.batch_schedule=[[5, 8], [0, 4]]"],
            "a step and a batch size, by rising steps; e.g. '--train.batch_schedule=[[0, 16], [1000, 64]]'",
        ),
        (["--model.vocab_size=100"], "model.vocab_size = 100 is smaller than tokenizer.vocab_size = 4096"),
        (["--tokenizer.path=no.json"], "tokenizer.path: nothing at no.json"),
        (["--optim.name=adafactor"], "should be 'adamw', 'sgd' or 'muon'"),
        (["--optim.groups=[{lr_factor = 2.0}]"], "0.match field required"),
        (["--optim.groups=[{match = '*', rate = 2.0}]"], "0.rate extra inputs are not permitted"),
        (["--checkpoint.api=pickle"], "should be 'dtensor' or 'dcp'"),
        (["--train.steps=true"], "should be a valid integer"),
        (["--config", "configs/no_such.toml"], "no such file"),
        (["--run.name"], "command line: --run.name needs a value, e.g. --run.name=default"),
        (["--eval.evry=3"], "the nearest known one is eval.every"),
        (["--checkpoint.evry=3"], "the nearest known one is checkpoint.every"),
        (["--optim.lr=inf"], "should be a finite number"),
        (["--fsdp.param_dtype=float8"], "should be 'float32', 'bfloat16' or 'float16'"),
        (["--fsdp.reshard_after_forward=1"], 'should be "default", true, false, or a number of ranks above 1'),
        (["--fsdp.reshard_after_forward=never"], 'should be "default", true, false, or a number of ranks above 1'),
        (["--fsdp.reshard_after_forward=2"], "should divide dp_shard = 1 and be less than it; true works"),
        (["--fsdp.dp_replicate=0"], "fsdp.dp_replicate = 0 should be -1 (all remaining ranks) or at least 1"),
        (["--fsdp.sharding_strategy=ZERO"], "should be '', 'FULL_SHARD', 'SHARD_GRAD_OP'"),
        (
            ["--fsdp.sharding_strategy=FULL_SHARD", "--fsdp.reshard_after_forward=false"],
            'sharding_strategy = "FULL_SHARD" means reshard_after_forward = true; leave one of the two out',
        ),
        (["--fsdp.sharding_strategy=NO_SHARD", "--fsdp.dp_shard=2"], "means dp_shard = 1"),
        (["--fsdp.sharding_strategy=HYBRID_SHARD", "--fsdp.dp_replicate=1"], 'without them use "FULL_SHARD"'),
        (["--fsdp.grad_sync=all_reduce_last"], 'but dp_replicate = 1 and dp_shard = 1; "every" or "last" works'),
        (["--fsdp.cpu_offload"], "but this run uses no GPU; fsdp.cpu_offload = false works"),
        (["--fsdp.forward_prefetch=3"], "fsdp.forward_prefetch = 3 has no effect without fsdp.explicit_prefetching"),
        (["--grad_scaler.min_scale=2"], 'has no effect without a dtype "float16" in [fsdp]'),
        (
            ["--fsdp.param_dtype=float16", "--grad_scaler.init_scale=8", "--grad_scaler.min_scale=9"],
            "grad_scaler.min_scale = 9.0 is above grad_scaler.init_scale = 8.0",
        ),
        (
            ["--fsdp.param_dtype=float16", "--grad_scaler.init_scale=1e39"],
            "than or equal to 1267",
        ),
        (["--activation_checkpointing.every=2"], 'has no effect without activation_checkpointing.mode = "full"'),
        (
            ["--activation_checkpointing.mode=full", "--activation_checkpointing.every=9"],
            "applies only to the first of 4 blocks; every = 3 works",
        ),
        (["--compile.backend=eager"], "compile.backend = eager has no effect without compile.enabled = true"),
        (["--fsdp.precision_overrides=[{param_dtype = 'float32'}]"], "0.match field required"),
        (["--fsdp.precision_overrides=[{match = '*', param_dtype = 'int8'}]"], "0.param_dtype should be 'float32'"),
    ],
)
def test_each_invalid_option_has_its_message(argv: list[str], expected: str) -> None:
    assert expected in mistakes(*argv)


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("", True, "compile.enabled = true needs the C++ compiler g++ (or another one in $CXX), which is missing"),
        (None, False, "Python.h; python3-dev or similar), which is missing"),
    ],
)
def test_compilation_without_a_compiler_is_an_error(
    path: str | None, headers: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    else:
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    if not headers:
        monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    assert expected in mistakes("--compile.enabled")
    assert parse("--compile.enabled", "--compile.backend=aot_eager")


@pytest.mark.parametrize(
    ("strategy", "more", "expected"),
    [
        ("FULL_SHARD", [], (True, 1, 8)),
        ("SHARD_GRAD_OP", [], (False, 1, 8)),
        ("HYBRID_SHARD", [], (True, 2, 4)),
        ("_HYBRID_SHARD_ZERO2", [], (False, 2, 4)),
        ("HYBRID_SHARD", ["--fsdp.dp_replicate=4"], (True, 4, 2)),
        ("HYBRID_SHARD", ["--fsdp.dp_shard=2"], (True, 4, 2)),
        ("NO_SHARD", [], (False, 8, 1)),
        ("FULL_SHARD", ["--fsdp.reshard_after_forward=true", "--fsdp.dp_shard=8"], (True, 1, 8)),
    ],
)
def test_fsdp1_strategies_become_their_fsdp2_options(
    strategy: str, more: list[str], expected: tuple[bool, int, int]
) -> None:
    """On two machines of four ranks each."""
    argv = [f"--fsdp.sharding_strategy={strategy}", *more]
    loaded = cli.parse(argv, world_size=8, n_gpus=0, local_world_size=4).loaded
    layout = derive(loaded.config, 8)
    assert (loaded.config.fsdp.reshard_after_forward, layout.dp_replicate, layout.dp_shard) == expected
    assert loaded.origins["fsdp.reshard_after_forward"] in (f'sharding_strategy "{strategy}"', "command line")


def test_a_hybrid_strategy_without_shards_is_another_strategy() -> None:
    argv = ["--fsdp.sharding_strategy=_HYBRID_SHARD_ZERO2", "--fsdp.dp_shard=1"]
    with pytest.raises(ConfigError, match='without them use "NO_SHARD"'):
        cli.parse(argv, world_size=8, n_gpus=0, local_world_size=4)
    assert cli.parse(argv, world_size=1, n_gpus=0), "one rank on a machine: the strategy itself means that"


def test_minus_one_is_the_remaining_ranks() -> None:
    for argv, expected in (
        ([], (1, 8)),
        (["--fsdp.dp_shard=1"], (8, 1)),
        (["--fsdp.dp_shard=2"], (4, 2)),
        (["--fsdp.dp_replicate=2"], (2, 4)),
    ):
        layout = derive(parse(*argv, world_size=8).config, 8)
        assert (layout.dp_replicate, layout.dp_shard) == expected


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--optim.freeze=['nope']", 'optim.freeze: "nope" matches no parameter'),
        ("--optim.groups=[{match = 'nope'}]", 'match = "nope" matches no parameter'),
        ("--fsdp.precision_overrides=[{match = 'nope', param_dtype = 'bfloat16'}]", "matches no parameter"),
    ],
)
@pytest.mark.extended
def test_patterns_are_checked_before_there_is_a_process_group(option: str, expected: str) -> None:
    result = python("--check-config", option)
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_file_suggests_the_one_that_was_meant(tmp_path: Path) -> None:
    write(tmp_path / "debug.toml", "")
    assert f"did you mean {tmp_path / 'debug.toml'}?" in mistakes("--config", str(tmp_path / "debgu.toml"))


def test_a_circular_base_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'base = "b.toml"\n')
    write(tmp_path / "b.toml", 'base = "c.toml"\n')
    write(tmp_path / "c.toml", 'base = "b.toml"\n')
    assert "form a cycle: b.toml -> c.toml -> b.toml" in mistakes("--config", str(tmp_path / "a.toml"))


def test_missing_base_is_named_with_the_file_that_wants_it(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'base = "gone.toml"\n')
    assert "gone.toml: no such file (named as base by a.toml)" in mistakes("--config", str(tmp_path / "a.toml"))


def test_broken_toml_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "[train]\nsteps = = 3\n")
    assert "a.toml: can't be read as TOML" in mistakes("--config", str(file))
    assert "line 2" in mistakes("--config", str(file))


def test_batch_and_mesh_sizes_are_derived() -> None:
    config = parse("--train.micro_batch_size=4", "--train.global_batch_size=30", "--fsdp.dp_replicate=2", world_size=4)
    layout = derive(config.config, 4)
    assert (layout.dp_replicate, layout.dp_shard) == (2, 2)
    assert (layout.grad_accum_steps, layout.masked_sequences) == (2, 2)
    assert layout.tokens_per_step == 30 * config.config.train.seq_len


def test_plain_python_exits_with_2_and_no_traceback() -> None:
    result = python("--train.step=5", "--train.steps=x")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "the configuration has 2 problems" in result.stderr


@pytest.mark.extended
def test_under_torchrun_the_message_is_printed_once_and_repeated_at_the_end() -> None:
    result = torchrun(2, "--train.step=5")
    assert result.returncode == 1  # torchrun's own
    ours, torchruns = result.stderr.split("ChildFailedError", 1)
    assert ours.count("the configuration has 1 problem") == 1
    assert "the configuration has 1 problem" in torchruns
    assert "exitcode  : 2" in result.stderr


def test_help_lists_every_key_with_meaning_and_default() -> None:
    result = python("--help")
    assert result.returncode == 0
    text = " ".join(result.stdout.split())
    for key, field in schema.known_keys().items():
        assert f"--{key}" in text
        assert field.description, f"{key} has no help"
        assert f"{field.description} (default: " in text


def test_the_reference_is_made_from_the_config() -> None:
    page = (ROOT / "docs/config.md").read_text()
    assert page == "\n".join(config_reference.lines()) + "\n", (
        "python -m torchtitan_lite.tools.config_reference > docs/config.md"
    )


def test_check_and_print_config_exit_with_0() -> None:
    assert "the configuration is fine" in python("--check-config").stdout
    assert "steps = 3   " in ranks(1, "--print-config", "--train.steps=3", "--optim.warmup_steps=0").stdout


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], True),
        (["--model.dim=64"], False),
        (["--model.size=1M", "--model.dim=64"], True),
        (["--model.size=8B"], False),
    ],
)
def test_another_shape_is_a_plain_llama(argv: list[str], expected: bool) -> None:
    """Switches of the default size are for its shape, unless the size is named."""
    config = cli.parse([*argv, "--check-config"], world_size=1, n_gpus=0, local_world_size=1).loaded.config
    assert config.model.qk_norm is expected
