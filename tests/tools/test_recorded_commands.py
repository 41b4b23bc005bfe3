"""Every word and number that the commands print, on made-up text: recorded_training.json and recorded_commands.json.

Nothing else holds: the lines of `which` and `checkpoint inspect`, the layout of tables, the help of tools, and most
messages; read their diffs. Scores are those of transformers in test_evaluate.py and test_tasks.py, greedy text that in
test_parity.py.
"""

import contextlib
import io
import json
import random
import re
import shlex
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers import checkpoint, damage, ranks
from tests.recorded import assert_recorded
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import python_command
from torchtitan_lite.errors import run_cli
from torchtitan_lite.tools import checkpoints, generate, migrate_accelerate, status
from torchtitan_lite.tools.evaluation import documents, evaluate
from torchtitan_lite.tools.which import main as which

WORDS = [
    *("Wälder", "übt", "the", "of", "and", "naïve", "地図", "図書", "café", "snow,", "rain.", "(old)", "[new]", "42"),
    *("1,000", "<|endoftext|>", "don't", "ÅNGSTRÖM", "über", "x"),
]
ESSAYS = {"first.txt": 9, "second.txt": 14, "notes.md": 3}

# what differs from machine to machine and from time to time
CHANGING = [
    (r"eta \S+ \([^)]*\)", "eta N"),
    (r"tok/s [\d,]+", "tok/s N"),
    (r"mem [\d.]+ GiB", "mem N GiB"),
    (r"  data \d+ %", "  data N %"),
    (r"mfu [\d.]+ %", "mfu N %"),
    (r", [\d.]+ s([,)])", r", N s\1"),
    (r"for [\d.]+ s\)", "for N s)"),
    (r"(peak +[\d.]+ MiB) +[\d.]+ MiB", r"\1 N MiB"),
    (r"(a step|steps|second)  +(?:[\d.,]+ s|\w+|[\d,]+)$", r"\1  N"),
    (r"\[rank\d\]:\[W.*\n", ""),
    (r".* # default\n", ""),
    (r"run     other processes use this machine.*\n", ""),
    (r"in \S+, goodput \d+% of \S+", "in N, goodput N% of N"),
    (r"[\d,]+ tokens per second, goodput \d+% of \S+", "N tokens per second, goodput N% of N"),
    (r"\b\d\w* ago", "N ago"),
    (r"[\d,.]+ tokens/s", "N tokens/s"),
    (r"torchtitan_lite \d\S*  torch \S+", "torchtitan_lite N  torch N"),
    (r"[0-9a-f]{12}\.\.\.", "HASH..."),
    (r"[0-9a-f]{16} x ", "HASH x "),
    (r"-> \"(?:[^\"\\]|\\.)*\"", "-> TEXT"),
    (r"^ *(matmul, TFLOP/s|lowest)  .*", r"\1  N"),
    (r"clocks within [\d.]+ s", "clocks within N s"),
    (r"connected in [\d.]+ s", "connected in N s"),
    (r"process \d+ on", "process N on"),
    (r"[\d,]+(?=  HASH...  state.json)", "N"),
    (r" +# ", " # "),
    (r"\[(\S+\.py):\d+\]", r"[\1]"),
]


def document(random_: random.Random, most: int = 40) -> str:
    return " ".join(random_.choices(WORDS, k=random_.randint(3, most)))


def write_texts(folder: Path) -> None:
    """Texts of two sources, pairs, and two tasks."""
    made = random.Random(7)

    def write(name: str, *lines: Any) -> None:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
        file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    write("news.jsonl", *({"text": document(made), "body": document(made, 9)} for _ in range(70)))
    for name, n in ESSAYS.items():
        write(f"essays/{name}", *(document(made) + "\n" * made.randint(0, 2) for _ in range(n)))
    write("pairs.jsonl", *({"q": document(made, 8), "a": document(made, 4)} for _ in range(60)))
    questions = [
        {"context": document(made, 9), "choices": [f" {document(made, 5)}" for _ in range(n)]} for n in (2, 4, 3, 2, 3)
    ]
    write("quiz.jsonl", {"score": "per_byte"}, *(one | {"answer": i % 2} for i, one in enumerate(questions)))
    write("last.jsonl", *({"context": document(made, 9), "continuation": f" {word}"} for word in WORDS[:7]))


PREPARED = [
    "FOLDER/news.jsonl --out FOLDER/data/news",
    "FOLDER/essays --text-suffixes=.md --out FOLDER/data/essays",
    "FOLDER/pairs.jsonl --source-key q --target-key a --source-prefix='answer: ' --out=FOLDER/data/pairs",
]
ALL = """
--run.out_dir=FOLDER --run.device=cpu --run.threads=1 --model.dim=24 --model.n_layers=2 --model.n_heads=2
--model.max_seq_len=48 --train.seq_len=32 --train.micro_batch_size=4 --optim.name=adamw --optim.lr=4e-3
--optim.warmup_steps=2 --eval.every=3 --eval.samples=5 --checkpoint.every=3 --log.every=2 --sample.every=0 """
NEWS = "--model.family=gpt --data.path=FOLDER/data/news --train.global_batch_size=6 --train.steps=7 "
RUNS = {  # by name
    "one": NEWS
    + """--optim.ema_decay=0.9 --checkpoint.keep_best --eval.tasks=FOLDER/quiz.jsonl,FOLDER/last.jsonl
    --eval.tasks_every=5 --sample.every=4 --sample.max_tokens=3 '--sample.prompts=["the", "地図 \\"x\\""]' """,
    "two": """--model.family=llama '--data.sources={"FOLDER/data/news" = 3.0, "FOLDER/data/essays" = 1.0}' --log.every=1
    --data.packing=best_fit --data.document_mask --train.micro_batch_size=16 --train.global_batch_size=96 --eval.every=4
    --model.n_kv_heads=1 --checkpoint.state_dict=sharded --checkpoint.every=epoch --fsdp.reshard_after_forward=false
    --activation_checkpointing.mode=full '--optim.freeze=["layers.0.*"]' --fsdp.explicit_prefetching
    '--data.skip_samples=[[100, 150]]' """,
    "experts": """--model.family=qwen3_moe --data.path=FOLDER/data/essays --run.peak_tflops=0.05 --train.steps=4
    '--train.batch_schedule=[[0, 4], [2, 7]]' '--data.skip_samples=[[4, 9]]' --model.head_dim=8 --eval.every=0
    --log.every=1 """,
    "answers": """--model.family=t5 --data.path=FOLDER/data/pairs --data.objective=pairs --data.target_len=24
    --train.global_batch_size=6 --train.steps=4 --sample.every=4 --sample.max_tokens=2 --checkpoint.async_save
    --checkpoint.every=9 """,
    "stopped": NEWS + "--run.max_minutes=1e-9 ",
    "worse": NEWS + "--optim.lr=0.1 --optim.schedule=constant --eval.every=1 --checkpoint.every=1 --log.every=1 "
    "--checkpoint.keep_latest=1 --checkpoint.keep_best --train.steps=4 --optim.warmup_steps=0 ",
    "failed": NEWS + "--optim.lr=1e30 --optim.warmup_steps=0 ",
    "inspected": NEWS
    + """--model.family=llama --model.hidden_dim=50 --model.qk_norm=false --model.dim=128 --fsdp.param_dtype=bfloat16
    '--optim.freeze=["layers.1.*"]'
    '--fsdp.precision_overrides=[{match = "layers.0.*", param_dtype = "float32", output_dtype = "bfloat16"}]' """,
}
TRAINING = [  # a run, the number of ranks, and further options
    *("one 1", "one 1 --dcp-api"),
    "one 1 --run.name=fork --checkpoint.resume=FOLDER/one/checkpoints/step-00000003 --optim.lr=1e-3 --train.steps=5",
    "one 1 --train.steps=8 --eval.samples=7 --run.threads=2",
    *("two 2 --train.epochs=1.5", "two 1 --train.epochs=1.75"),
    "two 1 --train.epochs=2 '--data.sources={\"FOLDER/data/news\" = 1.0}'",
    *("experts 1", "answers 1", "stopped 1", "worse 1"),
    *("failed 1", "failed 1", "failed 1 --retry"),
    "stopped 1 --dry-run --model.vocab_size=300 --train.batch_schedule=[[0,6],[4,9]]",
    *("inspected 2 --inspect", "experts 2 --inspect --fsdp.dp_shard=1"),
    "one 1 --run.name=from --model.init_from=FOLDER/damaged --train.steps=1 --optim.warmup_steps=0 --optim.ema_decay=0",
    *("one 1 --check-config", "one 1 --check-config --train.steps=9 --optim.lr=1e-3", "one 1 --print-config"),
    *(
        "one 1 --run.name=damaged --replay=8",
        "experts 1 --replay=4",
        "experts 1 --replay=0",
        "two 1 --train.epochs=1.5 --replay=5 --optim.lr=0.5",
    ),
    "one 1 --replay 9 --check-config --nosuch",
]


def shortened(text: str) -> str:
    """The beginning and the end of a long text."""
    lines = text.splitlines()
    return text if len(lines) <= 14 else "\n".join([*lines[:8], f"... {len(lines) - 10} lines", *lines[-2:]])


class Place:
    """A folder with texts, prepared data and runs, and what was said there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[str, Any] = {}

    def known(self, text: str) -> str:
        """A text without what differs from machine to machine."""
        text = text.replace(str(self.folder), "FOLDER").replace(f" on {socket.gethostname()}", " on HOST")
        text = text.replace(python_command(), "PYTHON")
        for pattern, name in CHANGING:
            text = re.sub(pattern, name, text, flags=re.M)
        return re.sub("^  (?:text|FOLDER).*$", lambda line: re.sub("(?<=.)  +", "  ", line[0]), text, flags=re.M)

    def result(self, code: Any, out: str, err: str) -> Any:
        found = {"exit": code, "out": self.known(out), "err": self.known(err)}
        return {key: value for key, value in found.items() if value} if code or err else found["out"]

    def words(self, line: str) -> list[str]:
        return shlex.split(line.replace("FOLDER", str(self.folder)))

    def train(self, line: str) -> None:
        run, n, *more = line.split(" ", 2)
        result = ranks(int(n), *self.words(f"--run.name={run} {ALL}{RUNS[run]}{''.join(more)}"))
        self.said[f"{len(self.said)}: {line}"] = self.result(result.returncode, result.stdout, result.stderr)

    def call(self, title: str, main: Callable[[Sequence[str]], Any], line: str) -> None:
        """A command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(self.words(line))
            except SystemExit as end:
                code = end.code
        said = out.getvalue()
        if "--help" in line:  # lines are broken otherwise by other versions of Python
            said = re.sub(r"\s+", " ", said).replace(" --", "\n--")
        if title == "which" or line.startswith("inspect"):
            said = shortened(said)
        self.said[f"{title} {line}{' again' * (f'{title} {line}' in self.said)}"] = self.result(
            code, said, err.getvalue()
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("recorded")
    write_texts(folder)
    made = Place(folder)
    for line in PREPARED:
        with contextlib.redirect_stdout(io.StringIO()):
            assert prepare([*made.words(line), "--tokenizer=bytes", "--val-fraction=0.2"]) == 0
    for line in TRAINING:
        if "init_from" in line:
            shutil.copytree(folder / "one", folder / "damaged")
            damage(checkpoint(folder / "damaged", 8))
            (checkpoint(folder / "damaged", 7) / "optimizer.safetensors").unlink()
        made.train(line)
    (folder / "unsaved/checkpoints").mkdir(parents=True)
    (folder / "bert").mkdir()
    (folder / "bert/config.json").write_text('{"model_type": "bert"}')
    shutil.copytree(folder / "stopped", folder / "lost")
    (checkpoint(folder / "lost", 2) / "state.json").unlink()
    made.said["folders"] = sorted(file.name for file in folder.iterdir())
    return made


def test_training(place: Place) -> None:
    assert_recorded(place.said, Path(__file__).with_name("recorded_training.json"))


ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_backward_prefetch_policy: BACKWARD_PRE,
  fsdp_forward_prefetch: true, fsdp_offload_params: false, fsdp_reshard_after_forward: NO_SHARD,
  fsdp_state_dict_type: SHARDED_STATE_DICT, fsdp_transformer_layer_cls_to_wrap: T5Block, fsdp_ignored_modules: null}
deepspeed_config: {gradient_clipping: 0, zero3_init_flag: true}
mixed_precision: bf16
num_machines: 2
num_processes: 16
main_process_ip: 10.0.0.1
main_process_port: 29500
use_cpu: false
other: 1
"""


def scored(words: Sequence[str]) -> int:
    """`evaluate` in this process."""
    wanted = evaluate.options_of(words)

    def run() -> int:
        evaluate.evaluate(wanted, Process(0, 1, torch.device("cpu"), 1))
        return 0

    return run_cli("evaluate", run)


def generated(words: Sequence[str]) -> int:
    """`generate`, without the new text: it may depend on the last bits of numbers."""
    if "--help" in words:
        return generate.main(words)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = generate.main(words)
    prompt = words[words.index("--prompt") + 1] if "--prompt" in words else ""
    print(out.getvalue()[: len(prompt)], end="")
    return code


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "migrate": migrate_accelerate.main,
    "status": status.main,
    "which": which,
    "generate": generated,
    "evaluate": scored,
    "checkpoint": checkpoints.main,
}
ROWS = {  # by command, the arguments of each call; FOLDER is the place's
    "checkpoint": """
verify one damaged stopped
verify FOLDER
verify nosuch
verify data
inspect one
inspect two
inspect two/checkpoints/step-00000006
inspect answers
inspect fork/checkpoints/step-00000005
inspect nosuch
export one hf
export two hf2 --best
import hf
inspect best
inspect worse
verify worse
export worse hf9 --best
export best hf3 --ema --best
export two no --ema
export one hf
export one one/run.json
import hf model.toml
import hf model.toml
import hf2
export answers hf4
import hf4
import one
import nosuch
import hf nosuch/model.toml
export experts hf5
import hf5
export failed no
inspect damaged
verify damaged
export damaged hf6
inspect lost
export lost no
verify lost
import bert
--help
export --help""",
    "migrate": """
accelerate.yaml
list.yaml
unsafe.yaml
broken.yaml
nosuch.yaml
--help""",
    "status": """
one
worse
long
two
stopped
failed
experts
best
.
nosuch
--help""",
    "which": """
long --find the
long --step 130
worse --step=2
rewound --step=4
rewound --step=5
rewound --step=8
rewound --step=11
one --step 1
one --step=6 --to=8 --json FOLDER/which.json
two --step 6
answers --step=2
experts --step=2 --to 3
fork --step=4
fork --step=3
fork --find 地図
one --find naïve --to 4
two --find=42
answers --find='(old) übt' --step 1 --to 3 --json FOLDER/found.json
experts --find=x --step 1 --to 2
one --find nowhere
one
one --find a --to=4
one --step=10
one --step=5 --to=4
one --step=5 --to=0
--help
one --step 3 --json=nosuch/x.json
nosuch --step 1
data --step 1""",
    "generate": """
one --prompt the --max-tokens 4
best --best --ema --prompt x --max-tokens=1 --temperature=0 --seed 3
answers --source x --beams 3 --length-penalty 0.5 --max-tokens 2
answers --source=''
answers --source 'word word word word word word word word word '
two --prompt=a --ema
one
one/checkpoints/step-00000008 --prompt a --top-k=3 --top-p 0.5 --max-tokens=2
hf --prompt a --max-tokens 2
hf --ema --prompt a
hf --best --prompt a
one --beams 2 --prompt a
nosuch --prompt a
data --prompt a
one --prompt a --tokenizer nosuch.json
one --prompt x --tokenizer larger.json
one --dtype bfloat16 --prompt a --max-tokens 1
bert --prompt a
one --temperature=nan --top-p nan --prompt a
one --temperature=inf --prompt a
one --prompt a --seed 99999999999999999999
one --prompt 'word word word word word word word word word word word word word word word word word word word word '
one --temperature=-1 --top-p=0 --top-k -2 --seed=-1 --max-tokens 0 --beams 1001 --length-penalty 11
one --interactive --max-tokens=2
--help""",
    "evaluate": """
one
two
answers
one two
best --best
worse --best
one fork --ema
best fork --best
one --split train --documents=5 --seq-len 48
one two fork --data FOLDER/news.jsonl FOLDER/essays --text-suffixes .md --documents 9 --seq-len 20 --batch-size 3
one --data FOLDER/news.jsonl --text-key body --json FOLDER/scores.json
one fork --tasks FOLDER/quiz.jsonl FOLDER/last.jsonl brackets --questions 4 --seq-len 30 --json FOLDER/tasks.json
hf one --data FOLDER/data/essays --tasks FOLDER/quiz.jsonl FOLDER/last.jsonl
hf3 hf --data FOLDER/data/news --tokenizer FOLDER/data/essays/tokenizer.json
answers --data FOLDER/data/pairs --split train --documents=5 --seq-len 12
one --data FOLDER/data/pairs
one fork --data FOLDER/essays --documents=2
hf
hf --data nosuch.txt
hf --data FOLDER/news.jsonl --seq-len=49
answers --data FOLDER/news.jsonl
hf --data FOLDER/news.jsonl --text-key title
nosuch
answers --tasks FOLDER/quiz.jsonl FOLDER/last.jsonl
one --tasks nosuch.jsonl
one --documents=0 --seq-len=-1 --batch-size 0 --questions=-2 --json .
two --ema
hf --best
one --json /dev/null/x.json
hf --data FOLDER/news.jsonl ''
hf --data FOLDER/news.jsonl FOLDER/empty.txt --documents 1
hf4 answers --data FOLDER/data/pairs --documents 99
hf4 answers --data FOLDER/data/pairs --split=train --documents=1
hf nosuch --data FOLDER/news.jsonl
hf --data FOLDER/news.jsonl --tokenizer=/dev/null
--help""",
}


def test_commands(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command with all of its options, on the runs above; and its mistakes."""
    monkeypatch.setenv("COLUMNS", "9999")  # no line of a help text is broken
    monkeypatch.chdir(place.folder)
    # fewer at a time than there are
    monkeypatch.setattr(documents, "ENCODED_TOGETHER", 4)
    monkeypatch.setattr(documents, "SORTED_TOGETHER", 6)
    monkeypatch.setattr("torchtitan_lite.tools.which._TOGETHER", 3)
    tools, folder = Place(place.folder), place.folder
    records = shutil.copytree(folder / "one", folder / "best") / "metrics.jsonl"
    records.write_text(re.sub(r'"val_loss": 5\.0', '"val_loss": 9.0', records.read_text()))  # that of step 8
    attempts = shutil.copytree(folder / "stopped", folder / "long") / "attempts.jsonl"
    longer = re.sub(r'(seq_len": )\d+', r"\g<1>90", attempts.read_text())  # of the samples, and of the model
    attempts.write_text(longer.replace('"train.steps": 7', '"train.steps": 130'))
    first = json.loads(attempts.read_text().splitlines()[0])
    rewound = shutil.copytree(folder / "stopped", folder / "rewound") / "attempts.jsonl"
    with rewound.open("w") as file:
        for number, (step, samples, size) in enumerate(((0, 0, 6), (10, 60, 4), (10, 60, 8), (4, 24, 5)), 1):
            config = first["config"] | {"train.global_batch_size": size, "train.steps": 20, "train.seq_len": 32}
            file.write(
                json.dumps(first | {"attempt": number, "step": step, "samples": samples, "config": config}) + "\n"
            )
    texts = {"list.yaml": "- mixed_precision: bf16\n", "unsafe.yaml": "!!python/object/apply:os.system [id]"}
    for name, text in (texts | {"accelerate.yaml": ACCELERATE, "broken.yaml": "a: b: c", "empty.txt": ""}).items():
        (folder / name).write_text(text)
    larger = Tokenizer.from_file(str(folder / "one/tokenizer.json"))
    larger.add_tokens(["another"])
    larger.save(str(folder / "larger.json"))
    for name, rows in ROWS.items():
        for row in rows.strip().splitlines():
            monkeypatch.setattr("sys.stdin", io.StringIO(f"the\n{'x' * 60}\n\nnot read\n"))
            tools.call(name, COMMANDS[name], row)
    for name in ("which", "found", "scores", "tasks"):
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8").replace(str(folder), "FOLDER"))
        content |= {"documents": [json.dumps(one, ensure_ascii=False) for one in content.pop("documents", ())]}
        tools.said[f"{name}.json"] = content
    tools.said["model.toml"] = tools.known((folder / "model.toml").read_text(encoding="utf-8"))
    assert_recorded(tools.said, Path(__file__).with_name("recorded_commands.json"))
