"""What the gateway needs in a service's folder beside the rendered files: keys, and a certificate."""

from pathlib import Path

from launcher.errors import UsageError
from launcher.gateway import keys
from launcher.gateway.keys import Key
from launcher.gateway.services import FOLDER
from launcher.plan import Gateway
from launcher.service_files import store_secret
from launcher.state import ServiceState


def install(gateway: Gateway, state: ServiceState) -> None:
    """Make what is missing, the service's own key among it, and write anew what the edge reads.

    Raises:
        UsageError: the certificate cannot be read, or is none; or the keys cannot be read.
    """
    if not own_key_file(state).is_file():
        store_secret(state, "api_key", keys.new_secret())
    write_map(state)
    if gateway.tls_certificate is not None:
        _write(secrets_dir(state) / keys.TLS_NAME, _certificate(Path(gateway.tls_certificate).expanduser()))


def own_key_file(state: ServiceState) -> Path:
    """Return the file of the service's own key: the launcher's commands show it to the gateway, the gateway to vLLM."""
    return state.secrets_dir / "api_key"


def secrets_dir(state: ServiceState) -> Path:
    """Return the folder that is mounted into the edge; the folder above keeps everyone else out."""
    return state.secrets_dir / FOLDER


def write_map(state: ServiceState) -> None:
    """Write the map of keys that the edge reads when it starts or is told to read again."""
    own = own_key_file(state).read_text(encoding="utf-8").strip()
    _write(secrets_dir(state) / keys.KEYS_NAME, keys.key_map((Key.of(keys.OWN, own), *keys.read(state))))


def _certificate(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"gateway.tls_certificate: {path}: cannot be read: {error}") from error
    for part in ("CERTIFICATE-----", "PRIVATE KEY-----"):
        if part not in text:
            raise UsageError(
                f"gateway.tls_certificate: {path}: no {part.rstrip('-')} in it; put the certificate, its chain and its "
                "key into one PEM file"
            )
    return text


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.parent.chmod(0o700)
    path.parent.chmod(0o755)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    partial.write_text(text, encoding="utf-8")
    # Readable inside the container; on this machine nobody but its owner comes as far as here.
    partial.chmod(0o444)
    partial.replace(path)
