"""A run in a bucket (`run.remote`), on machines without a shared disk, against an S3 server."""

import hashlib
import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
import pytest
import tomli

from tests.forkserver import free_port
from tests.helpers import (
    ROOT,
    assert_same_end,
    checkpoint,
    losses,
    python,
    ranks,
    refused,
    run_distributed,
    succeeded,
    tiny,
    until,
)
from torchtitan_lite import bucket
from torchtitan_lite.bucket import Bucket
from torchtitan_lite.checkpointing import remote, storage
from torchtitan_lite.checkpointing.remote import Remote
from torchtitan_lite.checkpointing.safetensors_file import write_text
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import BusyError, ConfigError, UserError


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[None]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with mock.patch.dict(
        os.environ,
        {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
            **{"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"},
            **{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"},
        },
    ):
        Bucket("s3://runs").fs.fs.mkdir("runs")
        yield
    server.stop()


def machines(
    n: int, disks: Path, *options: str, fault: str = "", dies: int = 0, waits_for: str = "0"
) -> subprocess.CompletedProcess[str]:
    """Run train.py on machines whose disks are in a folder.

    Args:
        dies: in its nth write of a checkpoint to the bucket.
        waits_for: what must be on the disks before each of these writes.
    """
    return ranks(
        n,
        *options,
        entry="tests.checkpointing.own_disks",
        env={"DISKS": str(disks), "DIES": str(dies), "WAITS_FOR": waits_for},
        fault=fault,
    )


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_two_torchruns_survive_the_loss_of_a_machine_and_of_both_disks(kind: str, text: Path, tmp_path: Path) -> None:
    values = {"run__name": kind, "checkpoint__state_dict": kind, "checkpoint__every": 2, "train__steps": 60}
    succeeded(ranks(2, *tiny(text, tmp_path, **values)))

    def machine(n: int, port: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={n}"),
                *(f"--master-port={port}", f"--rdzv-id={kind}", "train.py", "--run.remote=s3://runs/two"),
                *tiny(text, tmp_path / str(n), **values),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    for lost in ([1], [0, 1], []):
        port = free_port()
        both = [machine(n, port) for n in range(2)]
        assert not lost or any(line.startswith("bucket  step ") for line in both[0].stdout or ())
        for n in lost:
            both[n].send_signal(signal.SIGKILL)
        said = [machine.communicate()[0] for machine in both]
        assert [machine.returncode for machine in both] == [-9 if n in lost else len(lost) for n in range(2)], said
        for n in lost:
            shutil.rmtree(tmp_path / str(n))
    assert "resumed after step" in said[0]
    assert losses(tmp_path / "0" / kind) == losses(tmp_path / kind)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_survives_the_loss_of_one_disk_and_of_all(kind: str, text: Path, tmp_path: Path) -> None:
    values = {"checkpoint__state_dict": kind, "checkpoint__every": 3, "run__name": kind, "eval__every": 2}
    succeeded(ranks(2, *tiny(text, tmp_path, **values, train__steps=9)))
    here = [*tiny(text, tmp_path, **values, train__steps=9), "--run.remote=s3://runs/lost"]
    disks = tmp_path / "disks"
    assert "DIES" in machines(2, disks, *here, dies=1).stdout  # with the first checkpoint on the disks only
    shutil.rmtree(disks / "1")
    checkpoint(disks / "0" / kind, 3).joinpath(".killed.part").touch()  # a fetch that was
    said = machines(2, disks, *here, fault="kill:1:7").stdout
    assert ("resumed after step 3" in said, [*disks.rglob("*.part")]) == (kind == "full", []), said
    shutil.rmtree(disks / "1")
    stopped = succeeded(machines(2, disks, *here, "--run.max_minutes=0.0001"))
    assert re.search("resumed after step (3|6)" if kind == "sharded" else "resumed after step 6", stopped), stopped
    shutil.rmtree(disks)
    assert "the configuration is fine" in succeeded(machines(1, disks, *here, "--check-config"))
    assert not disks.exists()
    said = succeeded(machines(2, disks, *here))
    assert re.search(r"resumed after step [4578]\n", said)
    assert "bucket  step 9 is in s3://runs/lost" in said
    own = "*/*.safetensors", "*9"  # what the second machine has only of sharded checkpoints
    assert [bool([*disks.glob(f"1/*/checkpoints/{name}")]) for name in own] == 2 * [kind == "sharded"]
    copy = expand(f"s3://runs/lost/{kind}")
    assert not storage.verify(checkpoint(copy, 9))
    assert_same_end(copy, tmp_path / kind, 9)


def test_a_signal_saves_to_the_disks_first_and_steps_of_outdated_disks_do_not_count(text: Path, tmp_path: Path) -> None:
    values = {"run__name": "run", "train__steps": 12, "checkpoint__every": 4, "checkpoint__keep_latest": 1}
    here = tiny(text, tmp_path, **values, checkpoint__state_dict="sharded", run__remote="s3://runs/late")
    disks, stopped_at = tmp_path / "disks", "0/run/checkpoints/step-0000000[78]"
    # step 4 is uploaded once that one is on the disk, whose upload dies
    assert "DIES" in machines(2, disks, *here, fault="term:0:7", dies=5, waits_for=stopped_at).stdout
    disks.rename(tmp_path / "outdated")
    assert "resumed after step 4\n" in succeeded(machines(2, disks, *here, "--run.max_minutes=0.0001"))
    shutil.rmtree(disks)
    (tmp_path / "outdated").rename(disks)
    assert re.search(r"resumed after step [56]\n(.|\n)*DIES", machines(2, disks, *here, dies=5).stdout)
    # the upload of a complete run that was killed is made up for
    assert "bucket  step 12 is in s3://runs/late" in succeeded(machines(2, disks, *here))


def test_a_damaged_object_is_found_before_loading_and_the_step_before_is_used(text: Path, tmp_path: Path) -> None:
    url, disks = "s3://runs/damaged/run", tmp_path / "disks"
    here = [*tiny(text, tmp_path, run__name="run", checkpoint__every=1), "--run.remote=s3://runs/damaged/"]
    succeeded(machines(1, disks, *here, "--train.steps=4", "--optim.betas=[0.8, 0.9]"))
    shutil.rmtree(disks)
    fs = Bucket(url).fs
    flipped, short, lost = (fs.find(f"checkpoints/step-0000000{n}")[i] for n, i in ((4, 0), (3, 1), (2, 2)))
    fs.pipe_file(flipped, fs.cat_file(flipped)[:-1] + b"x")
    fs.pipe_file(short, fs.cat_file(short)[:-1])
    fs.rm_file(lost)
    said = succeeded(machines(1, disks, *here, "--train.steps=6"))
    assert [key for key in (flipped, short, lost) if f"{url}/{key}" not in said] == []
    assert re.search(r"resumed after step 1;(.|\n)*resume  optim.betas = \[0.8, 0.9\]: kept", said), said
    # the damaged steps are replaced, and other commands read the run at its URL, without its folder; first a fork with
    # a bucket of its own, which has none of the files
    shutil.rmtree(disks)
    assert "after its step 6" in succeeded(
        ranks(
            2,
            *tiny(text, tmp_path, run__name="fork", train__steps=8),
            f"--checkpoint.resume={url}",
            "--run.remote=s3://runs/forks",
        )
    )
    assert succeeded(python("verify", url, script="checkpoint.py")).count("complete ") == 6
    assert re.match(
        f"run     {url}: complete\n(.*\n)*bucket  step 6, ", succeeded(python(url, script="-m torchtitan_lite.status"))
    )
    for script, *words in (
        ("checkpoint.py", "inspect", url),
        ("checkpoint.py", "export", url, str(tmp_path / "exported"), "--best"),
        ("-m torchtitan_lite.report", "--table", url),
        ("-m torchtitan_lite.which", url, "--step=2"),
    ):
        succeeded(python(*words, script=script))
        refused(python(*(word.replace(url, f"{url}x") for word in words), script=script), "no run, complete checkpoint")
    assert not disks.exists()
    assert "starts from the weights of s3:" in succeeded(
        ranks(1, *tiny(text, tmp_path, run__name="new"), f"--model.init_from={url}/checkpoints/step-00000005")
    )
    # prepared data at a URL is fetched once
    succeeded(
        python(
            *(str(text), "--out", str(tmp_path / "data"), "--train-tokenizer", "400"),
            script="-m torchtitan_lite.data.prepare",
        )
    )
    fs.fs.put(str(tmp_path / "data"), "runs/data", recursive=True)
    own = tiny("s3://runs/data", tmp_path, run__name="own", train__steps=3)
    assert "fetching s3://runs/data" in (first := ranks(1, *own)).stderr + succeeded(first)
    assert "fetching" not in ranks(1, *own, "--train.steps=4").stderr


@pytest.mark.parametrize("times", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_torn_upload_is_never_taken_and_loses_no_complete_step(times: int, text: Path, tmp_path: Path) -> None:
    """Whether the machine comes back with its disk or an empty one."""
    rng, url, disks = random.Random(times), f"s3://runs/torn/{times}", tmp_path / "disks"
    values = {"train__steps": 5000, "checkpoint__every": 1, "eval__every": 0, "optim__schedule": "constant"}
    here = [*tiny(text, tmp_path, **values, run__name=str(times)), "--run.remote=s3://runs/torn"]
    complete = set[str]()
    for _ in range(times):
        died = machines(1, disks, *here, dies=rng.randrange(1, 13))
        assert "DIES" in died.stdout
        assert not complete or "new; the same command" not in died.stdout
        for last in re.findall(r"resumed after step (\d+)", died.stdout):  # not if it died in an upload before that
            assert int(last) >= max((int(step[5:]) for step in complete), default=0), died.stdout
        now, _ = Bucket(url).fetch_run(tmp_path / "read", newest=False)
        assert complete <= now.keys()
        complete = {*now}
        if rng.random() < 0.5:
            shutil.rmtree(disks)
    assert len(complete) > times / 2


def test_machines_that_share_a_disk_are_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "1").symlink_to(tmp_path / "0")
    refused(machines(2, tmp_path, *tiny(text, tmp_path), "--run.remote=s3://runs/shared"), "machines share", code=1)
    assert not [*tmp_path.glob("0/*/.own-*")]


def case_claims(process: Process, tmp_path: Path) -> None:
    """On memory://, which one process shares with itself."""

    def start(job: str, disk: str = "a") -> Remote:
        run = RunConfig(remote="memory://claims/", name="run", out_dir=os.path.relpath(tmp_path / disk))
        return Remote(Config(run=run), process, job, lambda *_: None)

    def save(by: Remote, step: int) -> dict[str, object]:
        (by.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (by.folder / "a.log").touch()
        folder = storage.new_folder(by.folder / "checkpoints", step)
        files = {"model.safetensors": write_text(folder / "model.safetensors", by.claim)}
        folder = storage.commit(folder, TrainState(step=step), "full", 1, files, None, by.claim)
        by.upload(folder, 9, lambda steps: {*steps[:1], *steps[-2:]})
        return by._outcome(wait=True) | {"complete": [*by._steps]}

    first = start("x", "a")
    first.bucket.fs.pipe_file("probes/left", b"by a start that was killed")
    assert "upload_s" in save(first, 1)
    second = start("x", "b")  # torchrun has started again without the first machine
    assert '"folder": "/' in second.bucket.fs.cat_file("claims/00000002").decode()
    assert "has taken over" in str(save(first, 2)["upload_error"])
    assert "upload_s" in save(second, 2)
    # however late a displaced run looks, it replaces no manifest, and its own is replaced
    with mock.patch.object(Remote, "require_newest"):
        assert "of a later start" in str(save(first, 2)["upload_error"])
        assert "upload_s" in save(first, 3)
    assert second.bucket.fs.find(second.claim) == [f"{second.claim}/a.log"]
    read = tmp_path / "read/checkpoints"
    second.bucket.fetch_run(read.parent, newest=False)
    for file, content in ("1/manifest.json", '{"claim": "9"}'), ("3/model.safetensors", "of the first"):
        write_text(read / f"step-0000000{file}", content)  # a step was saved here since then, one was copied
    assert "upload_s" in save(second, 3)
    assert not second.bucket.fs.find("probes")
    with (
        mock.patch.object(Bucket, "create", lambda own, key, content: not own.fs.pipe_file(key, content)),
        pytest.raises(ConfigError, match="If-None-Match"),
    ):
        second.bucket.now()
    with (
        mock.patch.object(Bucket, "now", return_value=datetime.now(UTC) + timedelta(days=1)),  # by no machine's clock
        mock.patch.object(remote, "RENEW_S", 0.01),
        mock.patch.object(Remote, "_write_claim") as renewed,
    ):
        third = start("y", "d")
        assert save(third, 4)["complete"] == ["step-00000004"], "since its start"
        until(lambda: renewed.called, "a renewed claim")
    with pytest.raises(ConfigError, match="job y has taken over"):
        second.require_newest()
    assert [
        *second.bucket.fetch_run(read.parent, newest=False)[1],
        *(bucket.claim_of(file.read_bytes()) for file in sorted(read.glob("*/manifest.json"))),
        *read.glob("*/model.safetensors"),  # of the save that was replaced
    ] == ["9", second.claim, third.claim]  # retention has deleted step 2, here as well
    third.close()
    assert start("none", "e").claim.startswith("00000004-")  # it has ended
    for job, disk, host in (("y", "e", "node7"), *((job, "f", socket.gethostname()) for job in ("y", "none"))):
        with (
            mock.patch.object(socket, "gethostname", return_value=host),
            mock.patch.object(time, "time", return_value=0.0),
            pytest.raises(BusyError, match="is being used by a process on"),
        ):
            start(job, disk)  # whatever its clock says


def case_report(process: Process, tmp_path: Path) -> None:
    """Two machines, the second of which can't upload."""
    run = RunConfig(remote=f"file://{tmp_path}/bucket", name="run", out_dir=str(tmp_path / str(process.rank)))
    vars(remote).update(local_rank=lambda: 0, PAUSES_S=(0,))
    by = Remote(Config(run=run), process, "x", lambda *_: None)
    (by.folder / "checkpoints").mkdir(parents=True)
    new = storage.new_folder(by.folder / "checkpoints", 1)
    if process.rank == 1:
        by.bucket.fs.put_file = mock.Mock(side_effect=[OSError("disk 1"), OSError("disk 7")])
    by.upload(storage.commit(new, TrainState(step=1), "sharded", 2, {}, None, by.claim), 9, lambda steps: {*steps})
    assert process.rank == 1 or "disk 7" in str(by._outcome(wait=True)["upload_error"])
    assert ([*tmp_path.glob("bucket/**/manifest.json")], by._store.timeout.days) == ([], 30)


@pytest.mark.parametrize(("case", "n"), [(case_claims, 1), (case_report, 2)])
def test_one_start_has_the_run_and_a_displaced_one_changes_nothing(case: Any, n: int, tmp_path: Path) -> None:
    """And a step that a machine can't upload is not committed."""
    run_distributed(case, n, tmp_path)


def test_a_start_keeps_no_older_history_mixes_no_runs_and_writes_nothing_elsewhere(tmp_path: Path) -> None:
    own, history, moved = Bucket("memory://histories"), tmp_path / "run/attempts.jsonl", list[int]()
    own.fs.pipe(
        {  # of two starts, and of a third one that has not uploaded its history
            "00000001-cccccccc/attempts.jsonl": b'{"claim": "00000001-cccccccc"}\n',
            "00000002-bbbbbbbb/attempts.jsonl": b'{"claim": "-"}\n{"claim": "00000002-bbbbbbbb", "why": "aaaaaaaa"}\n',
            "00000009-dddddddd/metrics.jsonl": b"dddddddd",
        }
    )
    history.parent.mkdir()
    # as long, but of a start that uploaded nothing; of that start, which has not ended; of a later one; and of this run
    # before it had a bucket, with a start that no other machine knows
    for claims, is_newer in (["01-b"], False), (["02-b"], True), (["01-b", "03-b"], True), ("--", False):
        history.write_text(
            "".join(f'{{"claim": "{claim.replace("0", "0000000").replace("b", "bbbbbbbb")}"}}\n' for claim in claims)
        )
        own.fetch_run(history.parent)
        assert ("aaaaaaaa" in history.read_text()) != is_newer
    history.write_text('{"claim": ""}\n')
    with pytest.raises(ConfigError, match="different runs"):
        own.fetch_run(history.parent)
    assert history.read_text() == '{"claim": ""}\n'
    own.fs.pipe_file("checkpoints/../../stolen", bytes(9 << 20))
    for key, sha256, said in (
        ("checkpoints/../../stolen", "another", f"{own.url}/checkpoints/../../stolen: its SHA-256 does not match"),
        ("checkpoints/../../stolen", hashlib.sha256(bytes(9 << 20)).hexdigest(), ""),
        ("gone", hashlib.sha256().hexdigest(), f"{own.url}/gone is missing"),
    ):
        found = own.fetch(key, history.parent, 0, sha256, moved.append)
        assert (found.startswith(said), bool(found)) == (True, bool(said))
    # no .part, all of a file, and the watchdog sees bytes move
    assert ({file.name: file.stat().st_size for file in history.parent.iterdir()}, moved) == (
        {"attempts.jsonl": 14, "stolen": 9 << 20},
        [8 << 20, 1 << 20] * 2,
    )
    with pytest.raises(BusyError, match=r"memory://histories/x takes .* GiB, but .*/run has only .* free"):
        own.fetch("x", history.parent, 1 << 63, "")


@pytest.mark.parametrize(
    ("url", "said"),
    {
        "foo://bucket": "such as s3://",
        "gs://bucket": "pip install",
        "runs/mine": "a URL such as s3://bucket/prefix",
        "s3://user:hunter2@runs": "without password",
        "s3://runs/x?key=hunter2": "without password or query",
        "s3://nowhere/x": "create the bucket first",
    }.items(),
)
def test_a_bucket_that_can_not_be_used_is_a_message(url: str, said: str, text: Path, tmp_path: Path) -> None:
    error = refused(machines(1, tmp_path / "disks", *tiny(text, tmp_path), f"--run.remote={url}"), said)
    assert "hunter2" not in error


def test_a_key_that_may_not_write_is_refused_before_training(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iam, may = boto3.client("iam"), {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}
    iam.create_user(UserName="reader")
    iam.put_user_policy(
        UserName="reader", PolicyName="reads", PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": may})
    )
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
    for mode in ([], ["--dry-run"], ["--check-config"]):
        refused(
            machines(1, tmp_path / "disks", *tiny(text, tmp_path, run__remote="s3://runs/read"), *mode),
            "allowed to list, read, write and delete",
        )


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (OSError(38, "implies functionality that is not implemented"), "If-None-Match", 2),
        (OSError(22, "the region 'us-east-1' is wrong; expecting 'eu-west-1'"), "AWS_DEFAULT_REGION", 2),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), "AWS_ACCESS_KEY_ID", 2),
        (OSError(5, "PermanentRedirect"), "AWS_DEFAULT_REGION", 2),
        (
            type("Failed", (OSError,), {"__cause__": PermissionError("denied")})("failed"),
            "credentials must be valid",
            2,
        ),
        (ConnectionError("reset"), "ConnectionError: reset", 1),
        (BusyError("as it is"), "^as it is$", 1),
    ],
)
def test_an_error_of_the_protocol_is_a_sentence(error: Exception, said: str, code: int) -> None:
    with pytest.raises(UserError, match=said) as raised, bucket.explained("s3://runs"):
        raise error
    assert raised.value.exit_code == code


def test_backups_as_docs_checkpoints_says(finished: Path, text: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/checkpoints.md").read_text().split("\n## Backups\n")[1].split("\n## ")[0]
    copy, restore = (block.split("```")[0] for block in page.split("```sh\n")[1:])
    *copies, verify = copy.splitlines()
    assert verify == "python checkpoint.py verify backup"
    shutil.copytree(finished, tmp_path / "runs/mine")
    (tmp_path / "runs/mine/checkpoints/.tmp-step-00000005-x").mkdir()
    subprocess.run(["sh", "-ec", "\n".join(copies)], cwd=tmp_path, check=True)
    words = "verify", str(tmp_path / "backup")
    assert succeeded(python(*words, script="checkpoint.py")).count("complete ") == 2
    (checkpoint(tmp_path / "backup", 2) / "state.json").unlink()  # as retention does to a copy in progress
    assert "state.json" in python(*words, script="checkpoint.py").stdout
    shutil.rmtree(tmp_path / "runs/mine")
    subprocess.run(["sh", "-ec", restore.replace("750", "004")], cwd=tmp_path, check=True)
    assert [*tmp_path.glob("runs/mine/checkpoints/*")] == [checkpoint(tmp_path / "runs/mine", 4)]
    assert "resumed after step 4" in succeeded(
        ranks(1, *tiny(text, tmp_path / "runs", run__name="mine", train__steps=5))
    )


DOCKERFILE = [line.split(" ", 1) for line in (ROOT / "scripts/Dockerfile").read_text().splitlines() if line[:1] != "#"]


def test_the_dockerfile_sets_up_this_repository_as_setup_sh_does() -> None:
    assert [word for word, _ in DOCKERFILE] == ["ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "RUN"]
    said = dict(DOCKERFILE)
    venv, extras = shlex.split(said["RUN"].removeprefix("sh scripts/setup.sh "))
    assert f"PATH={said['WORKDIR']}/{venv}/bin:$PATH" in said["ENV"].split()
    assert (
        set(extras.strip("[]").split(","))
        <= tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )
    assert not said["USER"].startswith(("0", "root"))


@pytest.mark.slow
def test_what_the_dockerfile_runs_works_in_an_empty_environment(tmp_path: Path) -> None:
    (first, last), folder = [said for word, said in DOCKERFILE if word == "RUN"], dict(DOCKERFILE)["WORKDIR"]
    image = tmp_path / "image"
    env = {"PATH": f"{image}/.venv/bin:{os.environ['PATH']}", "HOME": str(image)}
    subprocess.run(["sh", "-ec", first.replace(folder, str(image))], env=env, check=True)
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        (image / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, image / name)
    subprocess.run(["sh", "-ec", last], cwd=image, env=env, check=True)
    assert "is fine" in subprocess.check_output(
        ["python", "train.py", "--check-config", "--run.remote=memory://bucket"], cwd=image, env=env, text=True
    )
