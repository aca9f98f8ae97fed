"""The fixes, in the order in which they are applied."""

from vllm_graft.patch import Patch

FIXES: tuple[Patch, ...] = ()
