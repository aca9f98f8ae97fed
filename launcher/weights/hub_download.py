"""Download files of a repository: `python hub_download.py`, the request as a line of JSON on stdin.

The last line that it prints says what failed. A process of its own, since a download that hangs can only be ended from
outside. Plain HTTP with ranges, not the hub's Xet transfer and not `snapshot_download`: those begin an interrupted file
again from its first byte.
"""

import errno
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from http import HTTPStatus
from pathlib import Path
from typing import Any

WORKERS = 4
_CHUNK_BYTES = 1 << 18
"""Less than the library's 10 MB: what is not on disk when a download is ended is fetched again."""


def fetch(file: dict[str, Any], request: dict[str, Any]) -> None:
    """Bring one file into the folder; what an earlier call left of it in the folder `parts` is continued."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    folder, name, size_bytes = Path(request["folder"]), file["path"], file["size_bytes"]
    part = Path(request["parts"]) / name
    have_bytes = part.stat().st_size if part.exists() else 0
    if size_bytes is None or have_bytes > size_bytes:
        part.unlink(missing_ok=True)
        have_bytes = 0
    url = hf_hub_url(request["repo"], name, revision=request["revision"], endpoint=request["endpoint"])
    # Compressed bytes could be neither counted nor continued.
    headers = {**build_hf_headers(token=request["token"]), "Accept-Encoding": "identity"}
    with part.open("ab") as target:
        http_get(url, target, resume_size=have_bytes, headers=headers, expected_size=size_bytes)
        target.flush()
        os.fsync(target.fileno())
    part.replace(folder / name)


def failure(name: str, error: BaseException) -> dict[str, str]:
    """Return what kind of failure it is: `denied`, `missing`, `disk`, or `transient`, which is worth another try."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        kinds = {401: "denied", 403: "denied", 404: "missing", 410: "missing"}
        return {"kind": kinds.get(status, "transient"), "text": f"{name}: HTTP {status} {HTTPStatus(status).phrase}"}
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return {"kind": "disk" if is_full else "transient", "text": f"{name}: {text}"}


def _end_with_parent() -> None:
    # Its end closes the pipe, however it ended; another download of the same files may begin then.
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Download everything, or end at the first failure: the other files' bytes are kept."""
    from huggingface_hub import constants

    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with ThreadPoolExecutor(WORKERS) as pool:
        names = {pool.submit(fetch, file, request): file["path"] for file in request["files"]}
        for done in as_completed(names):
            error = done.exception()
            if error is not None:
                print(json.dumps(failure(names[done], error)), flush=True)
                os._exit(1)


if __name__ == "__main__":
    main()
