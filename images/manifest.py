"""Write an image's manifest: its base, the versions in it, and each fix with its proof. Runs inside the image build."""

import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path

NAMES = ("vllm", "torch", "triton", "transformers", "flashinfer-python", "vllm-graft")


def main(base: str, wheel: Path, proof: Path) -> None:
    """Put the manifest beside the proof; a distribution that is not installed is left out."""
    versions = {"python": platform.python_version()}
    for name in NAMES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    manifest = {
        "base": base,
        "versions": versions,
        "wheel": {"name": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()},
        "fixes": json.loads(proof.read_text(encoding="utf-8"))["fixes"],
    }
    text = json.dumps(manifest, indent=2) + "\n"
    proof.with_name("manifest.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
