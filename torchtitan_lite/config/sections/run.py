"""[run]: name, folder, seed and device."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from torchtitan_lite.config.section import BITS, FORK, PathText, Section


class RunConfig(Section):
    name: PathText = "default"
    """name of the run; if it is not set, that of the config file"""
    out_dir: PathText = "runs"
    """parent folder of all runs; the run is in <out_dir>/<name>"""
    remote: PathText = ""
    """a URL such as "s3://bucket/prefix", if machines share no disk: checkpoints go to <remote>/<name>"""
    seed: Annotated[int, FORK] = Field(default=0, ge=0, lt=2**63)
    """seed of the initial parameters, the data order and dropout"""
    device: Annotated[Literal["auto", "cpu", "cuda"], BITS] = "auto"
    """auto: cuda if there is a GPU, else cpu"""
    peak_tflops: NonNegativeFloat = 0.0
    """peak TFLOP/s of one device (dense), for MFU; 0: the published value"""
    threads: Annotated[int, BITS] = Field(default=0, ge=0, le=4096)
    """CPU threads per rank; 0: OMP_NUM_THREADS if it is set without a launcher, else the machine's cores (or CPU \
quota) divided by its ranks"""
    max_minutes: NonNegativeFloat = 0.0
    """save and exit after this many minutes; 0: no limit"""
    preempted_exit_code: int = Field(default=0, ge=0, le=125)
    """exit code after a stop by a signal, for launchers that take 0 for complete; not 1 or 2, which are failures"""
    timeout_minutes: float = Field(default=20.0, gt=0, le=525_600)
    """end the run, with stacks in stacks/, if no rank makes progress for this long; compiling, saving and loading \
are progress"""
    start_timeout_minutes: float = Field(default=0.0, ge=0, le=525_600)
    """how long a start waits for ranks that do not arrive or connect; 0: 3 minutes, plus 1 per 256 ranks"""
    tf32: Annotated[bool, BITS] = False
    """NVIDIA GPUs: float32 matmuls in TF32, several times faster"""
    deterministic: Annotated[bool, BITS] = False
    """CUDA: only deterministic (slower) kernels, for a bitwise-identical resume"""

    def start_minutes(self, world_size: int) -> float:
        """Return the limit of the start for a world of this size."""
        return self.start_timeout_minutes or 3.0 + world_size // 256
