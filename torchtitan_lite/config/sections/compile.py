"""[compile]: torch.compile."""

from typing import Annotated, Literal

from torchtitan_lite.config.section import Bits, Section, used_with


class CompileConfig(Section):
    enabled: Annotated[bool, Bits("compile")] = False
    """compile each block in place with torch.compile"""
    backend: Annotated[
        Literal["inductor", "aot_eager", "eager"], Bits("compile"), used_with("compile.enabled", True)
    ] = "inductor"
    """inductor: fused kernels, needs a compiler; the others only trace (for debugging)"""
