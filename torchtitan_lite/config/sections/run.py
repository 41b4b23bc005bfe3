"""[run]: name, folder, seed and device."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from torchtitan_lite.config.section import BITS, FORK, PathText, Section


class RunConfig(Section):
    name: PathText = "default"
    """name of the run; if a config file sets none, the file's name"""
    out_dir: PathText = "runs"
    """parent folder of all runs; this run's folder is <out_dir>/<name>"""
    remote: PathText = ""
    """where the run lives if machines share no disk: a URL such as "s3://bucket/prefix"; checkpoints are uploaded to \
<remote>/<name>, and a start fetches what it needs; empty: in out_dir only"""
    seed: Annotated[int, FORK] = Field(default=0, ge=0, lt=2**63)
    """seed of the initial parameters, the data order and dropout"""
    device: Annotated[Literal["auto", "cpu", "cuda"], BITS] = "auto"
    """device to train on; auto: cuda if there is a GPU, else cpu"""
    peak_tflops: NonNegativeFloat = 0.0
    """peak TFLOP/s of one device in the run's dtype (dense), for MFU; 0: the published value for the device's name; \
unknown on a CPU"""
    threads: Annotated[int, BITS] = Field(default=0, ge=0, le=4096)
    """CPU threads per rank; 0: OMP_NUM_THREADS if it is set and there is no launcher; otherwise the cores of \
the machine (or the CPU quota of the container), divided by the machine's number of ranks"""
    max_minutes: NonNegativeFloat = 0.0
    """save and exit after this many minutes; 0: no limit"""
    preempted_exit_code: int = Field(default=0, ge=0, le=125)
    """exit code after a stop by a signal (not by run.max_minutes), for launchers that take 0 for \
complete; not 1 or 2, which are failures"""
    timeout_minutes: float = Field(default=20.0, gt=0, le=525_600)
    """end the run, with stacks in stacks/, if no rank makes progress for this long; compiling, saving, loading and \
hashing are progress"""
    start_timeout_minutes: float = Field(default=0.0, ge=0, le=525_600)
    """how long the ranks wait for a rank that does not arrive or connect, or whose machine dies before the first \
step; 0: 3 minutes, plus 1 per 256 ranks"""
    tf32: Annotated[bool, BITS] = False
    """NVIDIA GPUs since Ampere: float32 matmuls in TF32 (10 bits of mantissa instead of 23), several times faster"""
    deterministic: Annotated[bool, BITS] = False
    """CUDA: use only deterministic (slower) kernels, for a bitwise-identical resume; the CPU is always deterministic"""

    def start_minutes(self, world_size: int) -> float:
        """Return the limit of the start for a world of this size."""
        return self.start_timeout_minutes or 3.0 + world_size // 256
