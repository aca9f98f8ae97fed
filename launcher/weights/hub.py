"""The Hugging Face hub, or a mirror of it: what a repository holds, asked within a bound."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.errors import Refused, UsageError
from launcher.profile import ModelFile

PROBE_TIMEOUT_S = 5.0
DEFAULT_ENDPOINT = "https://huggingface.co"
_SKIPPED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".tflite", ".mlmodel")
"""Other forms of the same weights: vLLM reads the safetensors."""


@dataclass(frozen=True)
class Hub:
    """A hub's URL, and the token to show there."""

    endpoint: str
    token: str | Literal[False] | None = field(default=None, repr=False)
    """None: that of $HF_TOKEN or `hf auth login`, where there is one; False: none."""


@dataclass(frozen=True)
class Unreachable:
    """The hub gave no answer in time, or none that is a hub's."""

    endpoint: str
    reason: str


@dataclass(frozen=True)
class Listing:
    """A repository at one commit: the files that serving needs."""

    revision: str
    files: tuple[ModelFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files)


def endpoint() -> str:
    """Return the hub's URL: `$HF_ENDPOINT`, else huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT


def look(hub: Hub, repo: str, revision: str | None) -> Listing | Unreachable:
    """List a repository; an answer that takes longer than 5 s, name resolution included, counts as none.

    Raises:
        UsageError: the hub has no such repository or revision.
        Refused: it wants a token, or a licence to be accepted.
    """
    answers: list[Listing | Unreachable | UsageError | Refused] = []
    # A thread, since no client bounds the time that resolving a name takes.
    asking = threading.Thread(target=lambda: answers.append(_ask(hub, repo, revision)), daemon=True, name="hub-probe")
    asking.start()
    asking.join(PROBE_TIMEOUT_S)
    answer = answers[0] if answers else Unreachable(hub.endpoint, f"no answer within {PROBE_TIMEOUT_S:g} s")
    if isinstance(answer, UsageError | Refused):
        raise answer
    return answer


def token_remedy(url: str) -> str:
    """Return what to do where a hub wants a token."""
    return (
        f"accept its licence at {url} and give a token of that account: `graft fetch --token-file FILE`, "
        "or the file secrets/hf_token of the profile's state folder"
    )


def is_needed(name: str) -> bool:
    """Whether a file at the top of a repository is one that serving reads."""
    return "/" not in name and not name.startswith(".") and not name.endswith(_SKIPPED_SUFFIXES)


def _ask(hub: Hub, repo: str, revision: str | None) -> Listing | Unreachable | UsageError | Refused:
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi(endpoint=hub.endpoint, token=hub.token).model_info(
            repo, revision=revision, timeout=PROBE_TIMEOUT_S, files_metadata=True
        )
    except errors.GatedRepoError:
        return Refused(f"{repo}: gated; {token_remedy(f'{hub.endpoint}/{repo}')}")
    except errors.RevisionNotFoundError:
        return UsageError(f"{repo}: {hub.endpoint} has no revision {revision}; correct it in the model's YAML")
    except errors.RepositoryNotFoundError:
        return UsageError(
            f"{repo}: {hub.endpoint} has no such repository, or it is private, or the token is not valid; check the "
            "name, or give a token that may read it with --token-file"
        )
    # HTTPError is the base of the hub's own errors and of its HTTP client's, which changed with the hub's releases.
    except (errors.OfflineModeIsEnabled, errors.HTTPError, OSError, ValueError) as error:  # type: ignore[attr-defined]
        return Unreachable(hub.endpoint, " ".join(str(error).split())[:200] or type(error).__name__)
    files = tuple(_needed([_file(sibling) for sibling in info.siblings or ()]))
    if info.sha is None or not files:
        return UsageError(f"{repo}: no safetensors in it; vLLM is served from safetensors here")
    return Listing(info.sha, files)


def _file(sibling: Any) -> ModelFile:
    lfs: Mapping[str, Any] | None = sibling.lfs
    return ModelFile(path=sibling.rfilename, size_bytes=sibling.size or None, sha256=lfs["sha256"] if lfs else None)


def _needed(files: Sequence[ModelFile]) -> Iterator[ModelFile]:
    """Yield the files to fetch; nothing where there are no safetensors."""
    if any(file.path.endswith(".safetensors") for file in files):
        yield from (file for file in files if is_needed(file.path))
