"""Types for Triton's decorator, which has none that a strict checker can follow.

A kernel is written as a plain function over `tl` values with `@kernel` above it. What comes back is
launched as `name[grid](...)`, and compiled ahead of time by `kernels.aot`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import triton


class Kernel(Protocol):
    """A function that runs on the GPU, or in the interpreter under TRITON_INTERPRET=1."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return the launcher for a grid of up to three sizes."""
        ...


def kernel(function: Callable[..., None]) -> Kernel:
    """Make a kernel of a function. The interpreter is chosen here, when its module is imported."""
    return cast("Kernel", triton.jit(function))


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with the constants of one real use, to be compiled ahead of time."""

    name: str
    kernel: Kernel
    pointers: dict[str, str]
    """Argument name to Triton type, such as `*i64`; taken as 16-byte aligned."""
    scalars: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict[str, int])
    """Compiler options, such as `num_warps`."""
