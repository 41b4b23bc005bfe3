"""Each mistake in a config has a message with what works; all are found at once, before any process group."""

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from tests.config.parsing import mistakes, one_of, parse, write
from tests.helpers import ROOT
from torchtitan_lite.checkpointing.compatibility import saved_config
from torchtitan_lite.checkpointing.storage import require_equal
from torchtitan_lite.config import cli
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.schema import Config, flatten, known_keys
from torchtitan_lite.config.sections.optim import OPTIMIZERS
from torchtitan_lite.errors import ConfigError, UserError
from torchtitan_lite.run import checks


def test_all_problems_at_once_with_file_nearest_key_and_a_working_value(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "[fsdp]\ndp_shard = 7\n[model]\nmax_seq_len = 999\n")
    file = write(
        tmp_path / "bad.toml",
        'base = "base.toml"\nextra = 1\n[train]\nstep = 10\nsteps = "many"\n[optim]\nlr = -1.0\nbetas = [0.9]\n'
        "[modell]\ndim = 3\n",
    )
    text = mistakes("--config", str(file), "--train.seq_len=4096", "stray", "--dcp-apj", world_size=2)
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
        "base.toml and command line: train.seq_len = 4096 is longer than model.max_seq_len = 999; model.max_seq_len = ",
    ):
        assert expected in text


T5 = ["--model.family=t5", "--data.objective=span_corruption"]
PAIRS = ["--data.objective=pairs", "--data.source_key=a", "--data.target_key=b", "--data.target_len=8"]
# options, and a part of their message
INVALID: list[tuple[list[str], str]] = [
    (["--model.dim=30", "--model.n_heads=4"], "n_heads = 3 works"),
    (["--optim.warmup_steps=500", "--train.steps=50"], "warmup_steps = 5 works"),
    (["--optim.betas=[0.9, 1.0]"], "optim.betas[1]: should be less than 1"),
    (["--fsdp.dp_shard=0"], "fsdp.dp_replicate = 1 x fsdp.dp_shard = 0 does not give the world size 1"),
    (["--fsdp.dp_replicate=3"], "does not give the world size 1; fsdp.dp_replicate = 1 with fsdp.dp_shard = 1"),
    (["--run.device=cuda"], 'torch sees no GPU here; run.device = "cpu" works'),
    (["--run.preempted_exit_code=2"], "is the exit code of a failure; run.preempted_exit_code = 75 works"),
    (["--run.name=a/b"], "should be the plain name of a folder"),
    (["--data.path=no/such/text"], "nothing found at no/such/text"),
    (["--model.size=9M"], "no such size of llama; known: 1M, 3M, 15M"),
    (["--model.n_kv_heads=3"], "n_kv_heads = 2 works"),
    (["--model.head_dim=33"], "rotary positions need an even head_dim, not 33; head_dim = 34 works"),
    (["--optim.schedule=wsd", "--optim.warmup_steps=700"], "reaches into the decay"),
    (["--optim.muon_momentum=0"], "should be greater than 0"),
    (
        ["--train.batch_schedule=[[5, 8], [0, 4]]"],
        "by rising steps; e.g. '--train.batch_schedule=[[0, 16], [1000, ",
    ),
    (["--model.vocab_size=100"], "model.vocab_size = 100 is smaller than tokenizer.vocab_size = 4096"),
    (["--tokenizer.path=no.json"], "tokenizer.path: nothing at no.json"),
    (
        ["--optim.name=adafactor"],
        f"{one_of(OPTIMIZERS)}; docs/extending.md adds one of your own; e.g. ",
    ),
    (["--model.family=mamba"], f"{one_of(FAMILIES)}; docs/own_model"),
    (
        ["--model.layer_pattern=delta,full"],
        'has "delta", which model.family = "llama" does not have; family = "olmo_hybrid" works',
    ),
    (["--optim.name=3"], f"{one_of(OPTIMIZERS)}; docs/extending.md"),
    (["--optim.groups=[{lr_factor = 2.0}]"], "optim.groups[0].match: field required; e.g. "),
    (["--optim.groups=[{match = '*', rate = 2.0}]"], "optim.groups[0].rate: extra inputs are not permitted; e.g. "),
    (["--checkpoint.api=pickle"], "should be 'dtensor' or 'dcp'"),
    (["--train.steps=true"], "should be a valid integer"),
    (["--config", "configs/no_such.toml"], "no such file"),
    (["--eval.evry=3"], "the nearest known one is eval.every"),
    (["--optim.lr=inf"], "should be a finite number"),
    (["--fsdp.param_dtype=float8"], "should be 'float32', 'bfloat16' or 'float16'"),
    (["--fsdp.reshard_after_forward=1"], 'should be "default", true, false, or a number of ranks above 1'),
    (["--fsdp.reshard_after_forward=never"], 'should be "default", true, false, or a number of ranks above 1'),
    (["--fsdp.reshard_after_forward=2"], "should divide dp_shard = 1 and be less than it; true works"),
    (
        ["--fsdp.dp_replicate=0"],
        "fsdp.dp_replicate = 0 x fsdp.dp_shard = 1 does not give the",
    ),
    (["--fsdp.sharding_strategy=ZERO"], "should be '', 'FULL_SHARD', 'SHARD_GRAD_OP'"),
    (
        ["--fsdp.sharding_strategy=FULL_SHARD", "--fsdp.reshard_after_forward=false"],
        'sharding_strategy = "FULL_SHARD" means reshard_after_forward = true; leave one of the two out',
    ),
    (["--fsdp.sharding_strategy=NO_SHARD", "--fsdp.dp_shard=2"], "means dp_shard = 1"),
    (["--fsdp.grad_sync=all_reduce_last"], 'but dp_replicate = 1 and dp_shard = 1; "every" or "last" works'),
    (["--fsdp.cpu_offload"], "but this run uses no GPU; fsdp.cpu_offload = false works"),
    (["--fsdp.reduce_scatter_buffers=0"], "should be greater than 0"),
    (["--fsdp.param_dtype=float16", "--grad_scaler.init_scale=0.5"], "should be greater than or equal to 1"),
    (["--fsdp.param_dtype=float16", "--grad_scaler.init_scale=1e39"], "than or equal to 1267"),
    (["--speed.float8"], 'speed.float8 = true needs fsdp.param_dtype = "bfloat16" for all groups'),
    (["--speed.float8", "--fsdp.shard_columns=*.wq.weight"], "by columns, but speed.float8 = true gathers rows"),
    (["--speed.float8", "--train.seq_len=66", "--train.micro_batch_size=2"], "give; multiples of 8 work, or speed"),
    (["--speed.float8", "--fsdp.cpu_offload"], "but speed.float8 = true casts them on the GPU"),
    (
        ["--fsdp.precision_overrides=[{param_dtype = 'float32'}]"],
        "overrides[0].match: field required",
    ),
    (
        ["--fsdp.precision_overrides=[{match = '*', param_dtype = 'int8'}]"],
        "fsdp.precision_overrides[0].param_dtype: should be 'float32'",
    ),
    (["--optim.betas=[nan,1.0]"], "optim.betas[0]: should be a finite number"),
    (["--optim.betas=[0.9]"], "optim.betas[1]: field required"),
    (["--train.batch_schedule=[[0,8.5]]"], "train.batch_schedule[0][1]: should be a valid integer"),
    (["--data.sources={nowhere = 1.0}"], "data.sources: nothing found at nowhere"),
    (["--data.sources={a = 0.0}"], "data.sources.a: should be greater than 0"),
    (["--data.sources={a = -1.0}"], "data.sources.a: should be greater than 0"),
    (["--run.timeout_minutes=1e12"], "should be less than or equal to 525600"),
    (["--model.n_layers=1000000000"], "should be less than or equal to 2048"),
    (["--model.family=qwen3_moe", "--model.n_experts=4", "--model.experts_per_token=5"], "experts_per_token = 4 works"),
    (["--model.mup_base_dim=64", "--model.tie_embeddings"], "model.tie_embeddings = false works"),
    (["--model.mup_base_dim=64", "--optim.name=sgd"], 'those of optim.name = "sgd" vary with the gradient'),
    ([*T5, "--fsdp.reduce_dtype=float16"], '"bfloat16" works in its place as param_dtype'),
    ([*T5, "--fsdp.param_dtype=float16"], "can't compute in float16"),
    (["--model.family=t5", "--model.size=t5-huge"], "no such size of t5; known: 1M, "),
    ([*T5, "--model.tie_embeddings"], "needs model.scale_output = true, or the initial logits"),
    ([*PAIRS, *T5[:1], "--data.target_len=2000"], "data.target_len = 2000 is longer than model.max_seq_len = 1024"),
    (["--model.init_from=no/such"], "model.init_from: nothing at no/such"),
    (T5[:1], 'from data.objective = "causal"; "span_corruption" works on text, and "pairs" on sources with'),
    (["--data.objective=span_corruption"], 'a decoder; data.objective = "causal" works, or model.family = "t5"'),
    ([*T5, "--train.seq_len=2"], 'and the end mark of data.objective = "span_corruption"; train.seq_len = 3 works'),
    ([*T5, "--data.packing=best_fit"], 'data.packing = "best_fit" is for data.objective = "causal", not'),
    ([*T5, "--data.document_mask"], 'data.document_mask = true is for data.objective = "causal", not'),
    (["--data.skip_samples=[[8, 8]]"], "should be pairs of a first sample and the one after"),
    (["--data.skip_samples=[[8, 12], [10, 16]]"], "ascending and without overlap"),
    (["--data.sources={a = 1.0}", "--data.path=b"], "data.path and data.sources are both set"),
    (
        [*PAIRS, "--data.target_len=0"],
        '"pairs" needs data.target_len, the maximum tokens of a target, e.g. data.target',
    ),
    ([*PAIRS, "--data.target_key=a"], "data.source_key = 'a' and data.target_key = 'a' should name"),
    (["--data.objective=pairs", "--data.target_len=8", "--data.source_key=a"], "data.target_key = '' should name"),
    ([*PAIRS, "--train.seq_len=1000", "--data.target_len=100"], "model.max_seq_len = 1100 works"),
    (["--profile.steps=[12, 10]"], "should be a first and a last step"),
    (["--checkpoint.resume=no/such"], "should be the path of a run or checkpoint: nothing at no/such"),
    (["--train.seq_len=2048"], "model.max_seq_len = 2048 works"),
    (["--train.epochs=1", "--train.batch_schedule=[[0, 8], [10, 16]]"], "train.steps works"),
    (["--eval.every=epoch", "--train.batch_schedule=[[0, 8], [10, 16]]"], "eval.every = 100 works"),
    (["--eval.every=often"], 'should be "epoch", or a number of steps of at least 0'),
    (
        ["--fsdp.sharding_strategy=SHARD_GRAD_OP", "--fsdp.reshard_after_forward=2"],
        "means reshard_after_forward = false",
    ),
]
ON_RANKS: list[tuple[list[str], int, int, str]] = [  # the same, with the number of processes and of GPUs
    (
        ["--fsdp.reshard_after_forward=3"],
        8,
        0,
        "= 3 should divide dp_shard = 8 and be less than it; 2 or 4 or true works",
    ),
    (
        ["--fsdp.shard_columns=*.w1.weight", "--fsdp.reshard_after_forward=2"],
        8,
        0,
        "reshard_after_forward = true works",
    ),
    (["--speed.float8", "--fsdp.reshard_after_forward=2"], 8, 8, "can't gather float8 again in backward"),
    (["--fsdp.cpu_offload", "--fsdp.dp_replicate=2"], 8, 8, "pull/180665 measured wrong ones, without an error;"),
    (["--fsdp.cpu_offload"], 8, 8, '"muon" exchanges gradients between GPUs'),
]


@pytest.mark.parametrize(
    ("argv", "world_size", "n_gpus", "expected"), [*((argv, 1, 0, expected) for argv, expected in INVALID), *ON_RANKS]
)
def test_each_invalid_option_has_its_message_and_what_it_offers_works(
    argv: list[str], world_size: int, n_gpus: int, expected: str
) -> None:
    text = mistakes(*argv, world_size=world_size, n_gpus=n_gpus)
    assert expected in text
    lines = text.splitlines()[1:]
    offers = {line: offered(line) for line in lines}
    try:
        parse(*argv, *itertools.chain(*offers.values()), world_size=world_size, n_gpus=n_gpus)
        left = []
    except ConfigError as error:
        left = str(error).splitlines()[1:]
    left = [line for line in left if "unknown key" not in line and "data/web" not in line]  # an example's folder
    assert set(left) <= {line for line in lines if not offers[line]}


def offered(line: str) -> list[str]:
    """The options of a line "... KEY = VALUE works" or "... e.g. KEY = VALUE", or of an option that it gives."""
    if option := re.search(r"e\.g\. '?(--.+?)'?$", line):
        return [option[1]]
    found = re.search(r"(?:; |e\.g\. )(\S+) = (\S+?)(?: with (\S+) = (\S+))?(?: works|$)", line)
    first, value, second, other = found.groups() if found else (None,) * 4
    values = {f".{first}": value, f".{second}": other}
    return [f"--{known}={values[end]}" for known in known_keys() for end in values if f".{known}".endswith(end)]


PARTS = Registry("a.key", "docs/page.md", int, {"one": 1, "two": 2})
READ = "c: the config that it was trained with can't be read: "
NAMES = sorted(map(str, range(20)))


@pytest.mark.parametrize(("call", "expected"), [
    (lambda: PARTS.add("nosuch:X"), f"a.key: nosuch:X: No module named 'nosuch' (looked in {ROOT}, too; docs/page.md "
     "has an example)"),
    (lambda: PARTS.add("math:pi"), "a.key: math:pi should be a int, not a float; docs/page.md has an example"),
    (lambda: PARTS.known("twoo"), "should be 'one' or 'two'; the nearest is 'two'; docs/page.md adds one of your own"),
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


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install -e ".[float8]"' in mistakes("--speed.float8")
    assert "compile.enabled = true needs the package triton, which is" in mistakes("--compile.enabled", n_gpus=1)
    assert 'log.trackers = ["wandb"]: wandb is not installed' in mistakes("--log.trackers=wandb")


ELSEWHERE = {  # what packages, files or GPUs decide: the tests below, and that of forks
    "which is missing; install it",
    "is not installed; run pip install",
    "which can't be in a list",
    "a run does not go back within its folder",
    "processes on this machine",
}


def test_every_rule_of_the_config_is_broken_by_a_row() -> None:
    found = [mistakes(*argv) for argv, _ in INVALID]
    found += [mistakes(*argv, world_size=n, n_gpus=gpus) for argv, n, gpus, _ in ON_RANKS]
    untested = []
    for file in sorted((ROOT / "torchtitan_lite/config/sections").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                words = [one.value for one in ast.walk(node.value.elts[1]) if isinstance(one, ast.Constant)]
                longest = max((word for word in words if isinstance(word, str)), key=len)
                if not any(longest in text for text in found):
                    untested.append(longest)
    assert [words for words in untested if not any(known in words for known in ELSEWHERE)] == []


def test_more_processes_than_gpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4 processes on this machine, and torch sees 2 GPUs; --nproc-per-node 2"):
        cli.parse([], world_size=8, n_gpus=2, local_world_size=4)
    assert cli.parse(["--run.device=cpu"], world_size=8, n_gpus=2, local_world_size=4)
    assert cli.parse([], world_size=8, n_gpus=4, local_world_size=4)


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("", True, "compile.enabled = true needs the C++ compiler g++ (or $CXX), which is missing"),
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


@pytest.mark.parametrize(("argv", "expected"), [
    ([], 20),
    (["--train.steps=21"], 20),
    (["--train.steps=20"], 2),
    (["--train.steps=5"], 0),
    (["--train.steps=24", "--optim.schedule=wsd"], 2),
])  # fmt: skip
def test_a_default_warm_up_fits_the_steps(argv: list[str], expected: int) -> None:
    assert parse(*argv).config.optim.warmup_steps == expected


def test_a_base_that_is_circular_or_missing_is_named_with_the_file_that_wants_it(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "b"), ("x", "gone")):
        write(tmp_path / f"{name}.toml", f'base = "{base}.toml"\n')
    assert "form a cycle: a.toml -> b.toml -> c.toml -> b.toml" in mistakes("--config", str(tmp_path / "a.toml"))
    assert "gone.toml: no such file (named as base by x.toml)" in mistakes("--config", str(tmp_path / "x.toml"))


def test_what_needs_several_ranks_is_refused_before_any_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    columns = ["--model.dim=36", "--model.n_heads=6", "--model.n_kv_heads=2", "--fsdp.shard_columns=*.w1.weight"]
    (uneven,) = {*checks.check_patterns(parse(*columns, "--model.n_layers=1", world_size=8).config).values()}
    assert "w1.weight has 36 columns, which fsdp.dp_shard = 8 does not divide; fsdp.dp_shard = 4 works, or" in uneven
    (unknown,) = checks.check_patterns(parse("--fsdp.shard_columns=*.wq", world_size=8).config).values()
    assert 'fsdp.shard_columns: "*.wq" matches no matrix' in unknown


def test_a_folder_without_text_is_found_by_the_check_of_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "notes.md", "some text")
    assert train.main(["--check-config", f"--data.path={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert f"no text at {tmp_path} (it has " in message
    assert "1 problem" in message
    assert train.main(["--check-config", f"--data.path={tmp_path}", "--data.text_suffixes=.md"]) == 0
