"""A run in a bucket (`run.remote`), on machines without a shared disk, against an S3 server."""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import assert_same_end, checkpoint, losses, ranks, succeeded, tiny
from torchtitan_lite.bucket import Bucket
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config.paths import expand


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    about = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}", "AWS_DEFAULT_REGION": "us-east-1"}
    about |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in about.items():
            patched.setenv(name, value)
        Bucket("s3://runs").fs.fs.mkdir("runs")
        yield
    server.stop()


def machines(n: int, disks: Path, *options: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run train.py on machines whose disks are in a folder."""
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")} | {"DISKS": str(disks)}
    return ranks(n, *options, entry="tests.checkpointing.own_disks", env=env, fault=fault)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.usefixtures("s3")
def test_a_run_survives_the_loss_of_one_disk_and_of_all(kind: str, text: Path, tmp_path: Path) -> None:
    values = {"checkpoint__state_dict": kind, "checkpoint__every": 2, "run__name": kind, "eval__every": 3}
    reference = tiny(text, tmp_path, **values, train__steps=9)
    succeeded(ranks(2, *reference))
    here = [*tiny(text, tmp_path, **values, train__steps=9), "--run.remote=s3://runs/lost"]
    disks = tmp_path / "disks"
    assert machines(2, disks, *here, fault="kill:1:7").returncode
    shutil.rmtree(disks / "1")
    stopped = succeeded(machines(2, disks, *here, "--run.max_minutes=0.0001"))
    assert re.search("resumed after step (4|6)" if kind == "sharded" else "resumed after step 6", stopped), stopped
    shutil.rmtree(disks)
    said = succeeded(machines(2, disks, *here))
    assert re.search(r"resumed after step [578]\n", said)
    assert "bucket  step 9 is in s3://runs/lost" in said
    assert bool([*disks.glob("1/*/checkpoints/*/*.safetensors")]) == (kind == "sharded")
    assert losses(disks / "0" / kind) == losses(tmp_path / kind)
    copy = expand(f"s3://runs/lost/{kind}")
    assert not storage.verify(checkpoint(copy, 9))
    assert_same_end(copy, tmp_path / kind, 9)
