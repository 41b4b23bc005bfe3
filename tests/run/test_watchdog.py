"""Watchdog: slow disks are tolerated, hanging ranks are named, and all ranks exit."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import _dynamo
from torch import distributed as dist

from tests.helpers import ranks, start, succeeded, tiny
from tests.run.blocked_worker import LIMITS, START_MINUTES
from tests.run.test_faults import RUN, saved_steps
from torchtitan_lite.distributed.lost import KILLED, explaining_lost_ranks, means_lost_rank
from torchtitan_lite.errors import StuckError
from torchtitan_lite.run.attempts import newest_status

SHARDED = {"checkpoint__state_dict": "sharded"}
slow = pytest.mark.slow

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {} (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.27.5\nnccl{}: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\n"
)
ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
LOST = [
    GLOO + "unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
    GLOO + "unbound_buffer.cc:129] Timed out waiting 3000ms for send operation to complete",
    GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:59106. This is typically caused by a remote worker",
    GLOO + "pair.cc:534] Read error [10.0.0.2]:4242: Connection reset by peer",
    GLOO + "pair.cc:355] writev [10.0.0.2]:4242: Broken pipe",
    GLOO + "unbound_buffer.cc:80] Application timeout caused pair closure",
    GLOO + "buffer.cc:80] Read timeout [10.0.0.2]:4242",
    GLOO + "pair.cc:144] Connection refused",
    GLOO + "pair.cc:144] Socket closed [10.0.0.2]:4242",
    GLOO + "pair.cc:144] Write timeout [10.0.0.2]:4242",
    "Socket Timeout",
    "Timeout waiting for key: default_pg/0/0 after 1800000 ms",
    GLOO + "buffer.cc:150] Operation timed out!",
    "Connect timeout [10.0.0.2]:4242",
    "Rank 1 timed out in monitoredBarrier after 3000 ms.",
    "Wait timeout",
    "NCCL communicator was aborted on rank 0. Original reason for failure was: [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600123 milliseconds",
    dist.DistStoreError("wait timeout after 5000ms, keys: /attempt 0//x"),
    dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:77, remote error"),
    dist.DistBackendError(NCCL.format("remote process exited or there was a network error", "RemoteError")),
    dist.DistBackendError(NCCL.format("unhandled system error", "SystemError")),
]
NOT_LOST = [
    "CUDA error: peer access is already enabled",
    "CUDA error: peer mapping resources exhausted",
    "CUDA error: peer access is not supported between these two devices",
    "CUDA error: an illegal memory access was encountered" + ASYNCHRONOUS,
    "CUDA error: device-side assert triggered" + ASYNCHRONOUS,
    "CUDA error: the launch timed out and was terminated" + ASYNCHRONOUS,
    "CUDA error: uncorrectable ECC error encountered" + ASYNCHRONOUS,
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "backend='inductor' raised:\nCompilationError: at 23:4:\n    tl.store(out_ptr0 + (x2), tmp8, None)\n    ^\n",
    "backend='inductor' raised:\nLoweringException: AssertionError: can't store to a peer buffer",
    "backend='inductor' raised:\nCppCompileError: C++ compile error",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help.",
    'Error(s) in loading state_dict for GPT:\n\tMissing key(s) in state_dict: "store.weight"',
    "Cannot store a tensor of dtype torch.int64 in a parameter",
    "setStorage: sizes [4], strides [1] need a storage of 16 bytes, which is out of bounds",
    "the value of timeout must be positive",
    "DataLoader: the socket of worker 3 is closed",
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
    dist.DistBackendError(NCCL.format("unhandled cuda error", "UnhandledCudaError")),
    dist.DistBackendError(NCCL.format("invalid argument", "InvalidArgument")),
    dist.DistBackendError(
        NCCL.format("invalid usage", "InvalidUsage") + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA"
    ),
    _dynamo.exc.TorchDynamoException("while reading the code: # Broken pipe"),
]


@pytest.mark.parametrize(("error", "expected"), [*((e, True) for e in LOST), *((e, False) for e in NOT_LOST)])
def test_communication_errors_are_told_from_others(error: str | RuntimeError, expected: bool) -> None:
    assert means_lost_rank(RuntimeError(error) if isinstance(error, str) else error) == expected


@pytest.mark.parametrize(("text", "expected", "secondary"), [
    (LOST[2], f"connection reset: a process died. {KILLED}. (Connection closed by peer [127.0.0.1]:59106)", True),
    (LOST[0], "timed out waiting for the other ranks. (Timed out waiting 3000ms for recv operation to complete)",
     False),
])  # fmt: skip
def test_a_lost_rank_is_explained_and_one_that_was_closed_is_not_the_first_to_fail(
    text: str, expected: str, secondary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    for world, error in (("1", RuntimeError), ("2", StuckError)):
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(error) as caught, explaining_lost_ranks():
            raise RuntimeError(text)
    assert (str(caught.value), getattr(caught.value, "secondary", None)) == (f"rank 3, starting: {expected}", secondary)
    with pytest.raises(RuntimeError, match="^CUDA error"), explaining_lost_ranks():
        raise RuntimeError(NOT_LOST[0])


@pytest.mark.parametrize("source", ["", pytest.param("--model.init_from={}", marks=slow)])
@pytest.mark.extended
def test_a_verification_may_take_longer_than_a_step(
    source: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen seconds of hashing on one rank, and a step may take twelve. Of a resume, or of weights to start from."""
    command = tiny(text, tmp_path, **RUN, **SHARDED, run__timeout_minutes=0.2)
    succeeded(ranks(2, *command, "--train.steps=5"))
    monkeypatch.setenv("FAULT_SECONDS", "8")
    more = [source.format(tmp_path / "run"), "--run.name=second"] if source else []
    slowly = succeeded(ranks(2, *command, *more, "--train.steps=6", fault=f"slow:{0 if source else 1}:0:hash:2"))
    assert source or "resumed after step 5" in slowly


@pytest.mark.parametrize(("fault", "more", "whom"), [
    ("hang:1:5:write", SHARDED, "rank 1 (saving step 5: writing shard-00001-of-00002.safetensors)"),
    pytest.param("hang:0:5:write", {}, "rank 0 (saving step 5: writing model.safetensors)", marks=slow),
    pytest.param("hang:0:5:commit", {}, "rank 0 (saving step 5: committing its folder)", marks=slow),
    pytest.param("hang:1:5:save", {}, "rank 1 (step 5, computing)", marks=slow),
    pytest.param(
        "hang:1:5:sync", {**SHARDED, "checkpoint__async_save": True},
        "rank 1 (saving step 5: writing shard-00001-of-00002.safetensors)", marks=slow,
    ),
])  # fmt: skip
def test_a_rank_that_hangs_inside_a_save_is_named(
    fault: str, more: dict[str, Any], whom: str, text: Path, tmp_path: Path
) -> None:
    result = ranks(2, *tiny(text, tmp_path, **RUN, **more, run__timeout_minutes=0.15), fault=fault, timeout=90)
    said = "saving step 5: no rank made progress for run.timeout_minutes = 0.15; the others wait for "
    assert (result.returncode, f"train.py: {said}{whom}. Stacks are in " in result.stderr) == (1, True), result.stderr
    run = tmp_path / "run"
    hanging = fault.split(":")[1]
    assert "faults/worker.py" in (run / f"stacks/rank-{hanging}.txt").read_text()
    assert (run / f"stacks/rank-{1 - int(hanging)}.txt").read_text()
    about = newest_status(run)
    assert (about["status"], about["reason"][: len(said)], saved_steps(run)) == ("failed", said, [])


# --- ranks that are blocked where no error arrives, as under NCCL ---------------------------------------------------


@pytest.mark.parametrize(("case", "whom"), [
    ("fetches", "the others wait for rank 1 (step 4, fetching its batch). "),
    pytest.param("compiler hangs", "all ranks are at the same place. ", marks=pytest.mark.extended),
])  # fmt: skip
def test_a_rank_that_is_blocked_in_c_ends_by_itself(case: str, whom: str, tmp_path: Path) -> None:
    result = ranks(2, str(tmp_path), case, entry="tests.run.blocked_worker", timeout=90)
    said = f"step 4: no rank made progress for run.timeout_minutes = {LIMITS.timeout_minutes:g}; {whom}"
    assert (result.returncode, f"train.py: {said}" in result.stderr) == (1, True), result.stderr
    about = newest_status(tmp_path)
    assert (about["status"], said in about["reason"]) == ("failed", True)
    for rank in range(2):
        assert "blocked_worker.py" in (tmp_path / f"stacks/rank-{rank}.txt").read_text()
    command = ["torch.distributed.flight_recorder.fr_trace", "--prefix", "gloo_trace_rank_", str(tmp_path / "stacks")]
    assert "collective: gloo:all_reduce\nmissing ranks: {1}\n" in start([sys.executable, "-m", *command]).stderr


@pytest.mark.parametrize("case", ["compiles", "leaves", "pauses", "all pause", "was locked"])
def test_a_process_that_works_or_that_others_have_left_is_waited_for(case: str, tmp_path: Path) -> None:
    """For more than the limit: a compilation.

    Or while the other one has left properly, one or both were stopped and continued, or one could not lock its file.
    """
    result = ranks(2, str(tmp_path), case, entry="tests.run.blocked_worker", timeout=90)
    assert succeeded(result).count(" is done") == 2
    assert case == "all pause" or not (tmp_path / "stacks").exists()  # a process that stood still has written its own


@pytest.mark.parametrize(("fault", "n", "said"), [
    ("exit:1:0:connect", 2, "train.py: rank 0, connecting dp_shard of ranks 0, 1 (HOST): connection reset: "
     "a process died: rank 1 (last seen: starting). "),
    ("hang:3:0:connect", 4, ": no rank made progress for run.start_timeout_minutes = 0.1; the others wait for rank 1 "
     "(connecting dp_replicate of ranks 1, 3 (HOST): its first all-reduce), rank 3 (connecting dp_replicate of "),
])  # fmt: skip
def test_a_group_that_does_not_connect_is_named_before_the_model_is_built(
    fault: str, n: int, said: str, text: Path, tmp_path: Path
) -> None:
    command = tiny(text, tmp_path, **RUN, fsdp__dp_replicate=n // 2, run__start_timeout_minutes=0.1)
    result = ranks(n, *command, fault=fault, timeout=90)
    assert said.replace("HOST", os.uname().nodename) in result.stderr, result.stderr


def test_a_machine_that_dies_while_it_starts_ends_the_run_within_the_limit_of_a_start(tmp_path: Path) -> None:
    result = ranks(2, str(tmp_path), "stops", entry="tests.run.blocked_worker", timeout=90)
    said = f"starting: no rank made progress for run.start_timeout_minutes = {START_MINUTES:g}; the others wait for"
    assert (result.returncode, f"{said} rank 1, silent for " in result.stderr) == (1, True), result.stderr
    assert said in newest_status(tmp_path)["reason"]
