"""The fixes, in the order in which they are applied."""

from vllm_graft.fixes import tq_spec_decode
from vllm_graft.patch import Patch

FIXES: tuple[Patch, ...] = (tq_spec_decode.PATCH,)
