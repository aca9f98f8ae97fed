"""Take out of a text what should not be pasted into an issue: secrets, users, hosts, addresses, private folders.

Better one word too much than one secret left: a shape that is nearly always a credential is taken out wherever it
stands, and of a secret that is known even a part of six characters. What helps to read a report stays: versions, model
names, ports, the loopback address, the first digits of a GPU's UUID.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import quote

SHORTEST_PART = 6
"""Characters of a known secret that count as a part of it."""
_PLACEHOLDER = re.compile(r"(\[(?:secret|email|user|host|ip|mac|folder|serial|private-key)\])")
_EVERYBODYS_USERS = frozenset(
    {"root", "vllm", "ubuntu", "debian", "user", "nobody", "app", "graft", "Public", "Shared"}
)
_EVERYBODYS_HOSTS = frozenset({"localhost", "host", "vllm", "graft", "ubuntu", "debian"})


@dataclass(frozen=True)
class _Shape:
    """What a private value looks like, and what stands in its place."""

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]

    def taken_out_of(self, text: str) -> str:
        return self.pattern.sub(self.replacement, text)


def redact(
    text: str,
    known_secrets: Iterable[str] = (),
    *,
    users: Iterable[str] = (),
    hosts: Iterable[str] = (),
    folders: Iterable[str] = (),
) -> str:
    """Return the text without private values; applying it again changes nothing.

    Args:
        known_secrets: taken out wherever they stand, also escaped, also parts of `SHORTEST_PART` characters or more.
        users: login names of this machine; those that everybody has, such as root, stay.
        hosts: names of this machine, short or with a domain.
        folders: absolute paths whose names are private; what is below them stays.
    """
    known = [*_secret_shapes(known_secrets), *_folder_shapes(folders), *_name_shapes(users, hosts)]
    for shape in (*known, *_SHAPES):
        parts = _PLACEHOLDER.split(text)
        text = "".join(part if number % 2 else shape.taken_out_of(part) for number, part in enumerate(parts))
    return text


def _secret_shapes(secrets: Iterable[str]) -> list[_Shape]:
    forms = {form for secret in secrets if secret.strip() for form in _forms(secret.strip())}
    shapes = [_Shape(re.compile(re.escape(form)), "[secret]") for form in sorted(forms, key=len, reverse=True)]
    parts = sorted({form[start : start + SHORTEST_PART] for form in forms for start in _starts(form)})
    if parts:
        # Overlapping parts are one run: whatever is a part, and each further character that ends another one.
        part = "|".join(map(re.escape, parts))
        shapes.append(_Shape(re.compile(rf"(?:{part})(?:(?<=(?:{part}))|.(?<=(?:{part})))*"), "[secret]"))
    return shapes


def _forms(secret: str) -> set[str]:
    """Return the secret as it stands in a file, in JSON and in a URL."""
    return {secret, json.dumps(secret)[1:-1], quote(secret, safe="")}


def _starts(form: str) -> range:
    return range(len(form) - SHORTEST_PART + 1)


def _folder_shapes(folders: Iterable[str]) -> list[_Shape]:
    named = {folder.rstrip("/") for folder in folders}
    longest_first = sorted((folder for folder in named if folder.count("/") > 1), key=len, reverse=True)
    return [_Shape(re.compile(rf"(?<![\w./-]){re.escape(folder)}(?![\w-])"), "[folder]") for folder in longest_first]


def _name_shapes(users: Iterable[str], hosts: Iterable[str]) -> list[_Shape]:
    private_users = {user for user in users if len(user) > 1} - _EVERYBODYS_USERS
    full = {host for host in hosts if host}
    private_hosts = {host for host in full | {host.partition(".")[0] for host in full} if len(host) > 1}
    return [
        _Shape(re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.IGNORECASE), placeholder)
        for names, placeholder in ((private_hosts - _EVERYBODYS_HOSTS, "[host]"), (private_users, "[user]"))
        for name in sorted(names, key=len, reverse=True)
    ]


def _credential(match: re.Match[str]) -> str:
    """Keep the name, take out the value, unless it is a number or a word that says that there is none."""
    is_harmless = re.fullmatch(r"[\d.]+|(?i:none|null|true|false|absent|present|unset|auto|\*+)", match["value"])
    return match[0] if is_harmless else f"{match['name']}[secret]"


def _home(match: re.Match[str]) -> str:
    return match[0] if match["user"] in _EVERYBODYS_USERS else f"{match['home']}[user]"


def _address_4(match: re.Match[str]) -> str:
    try:
        address = IPv4Address(match[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "[ip]"


def _address_6(match: re.Match[str]) -> str:
    try:
        address = IPv6Address(match[0])
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "[ip]"


_HEX = "[0-9A-Fa-f]"
_SHAPES = (
    _Shape(
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
        "[private-key]",
    ),
    # A scheme's user and password, then headers, then what has the name of a credential.
    _Shape(re.compile(r"(?<=://)[^\s/@'\"]+(?=@)"), "[secret]"),
    _Shape(
        re.compile(
            r"(?P<name>\b(?:(?:proxy-)?authorization|x-api-key|(?:set-)?cookie)[\"']?+\s*+[:=]\s*+[\"']?+)[^\s\"'][^\r\n\"']*",
            re.IGNORECASE,
        ),
        r"\g<name>[secret]",
    ),
    _Shape(re.compile(r"(?P<name>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.IGNORECASE), r"\g<name>[secret]"),
    _Shape(
        re.compile(
            r"(?P<name>(?<![\w-])[\w-]*(?:token|api[_-]?keys?|secret|passw(?:or)?d|credentials?|webhook)[\"']?+"
            r"(?:\s*+[:=]\s*+|(?<=api-key)\s++|(?<=password)\s++)[\[(\"']*+)(?P<value>[^\s\"',;\])}]+)",
            re.IGNORECASE,
        ),
        _credential,
    ),
    # Hugging Face: a whole token, one that was cut off, one that is masked; hf_xet and hf_config are no tokens.
    _Shape(
        re.compile(r"\bhf_(?:(?=[A-Za-z]*[A-Z0-9])[A-Za-z0-9]{2,}|[A-Za-z0-9]{16,}|[a-z]+(?=\.\.|…|\*))"), "[secret]"
    ),
    _Shape(re.compile(r"\bapi_org_\w{4,}"), "[secret]"),
    _Shape(re.compile(r"\b(?:sk|pk|rk|nvapi|glpat|xox[abprs])-[\w-]{4,}"), "[secret]"),
    _Shape(re.compile(r"\b(?:gh[pousr]|github_pat|dckr_pat|pypi)[_-]\w[\w-]{7,}"), "[secret]"),
    _Shape(re.compile(r"\bAKIA[0-9A-Z]{8,}\b"), "[secret]"),
    _Shape(re.compile(r"\beyJ[\w-]{6,}(?:\.[\w-]+){0,2}"), "[secret]"),
    _Shape(re.compile(r"(?<=hooks\.slack\.com/)[\w/-]+"), "[secret]"),
    _Shape(re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "[email]"),
    # A shell's prompt, the start of a line of the system log or of NCCL's, local domains, the fields of `docker info`.
    _Shape(re.compile(r"(?<![\w.-])[\w.-]+@[\w.-]+(?=:[~/])"), "[user]@[host]"),
    _Shape(
        re.compile(
            r"^(?P<when>\w{3} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.]+[+-]\d\d:?\d\d) [\w.-]+"
            r"(?= [\w.-]+(?:\[\d+\])?: )",
            re.MULTILINE,
        ),
        r"\g<when> [host]",
    ),
    _Shape(re.compile(r"(?:(?<=^)|(?<=\] ))[\w.-]+(?=:\d+:\d+ \[\d+\] )", re.MULTILINE), "[host]"),
    _Shape(re.compile(r"(?<=remote peer )[\w.-]+"), "[host]"),
    _Shape(re.compile(r"(?<=^Linux )[\w.-]+(?= \d+\.\d+)", re.MULTILINE), "[host]"),
    _Shape(re.compile(r"(?P<name>\bhost_?name[\"']?\s*[:=]\s*[\"']?)[\w.-]+", re.IGNORECASE), r"\g<name>[host]"),
    _Shape(
        re.compile(r"(?<![\w.-])(?:[\w-]+\.)+(?:local|lan|internal|intranet|corp|home|home\.arpa|ts\.net)\b(?!\.\w)"),
        "[host]",
    ),
    _Shape(
        re.compile(
            r"(?P<home>(?:/home|/Users|/media|/run/media|[A-Za-z]:\\+Users)(?:/|\\+))(?P<user>[^\s/\\:'\",;)\]]+)"
        ),
        _home,
    ),
    _Shape(
        re.compile(rf"\b(?P<start>(?:(?:GPU|MIG)-)?{_HEX}{{4}}){_HEX}{{4}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}\b"),
        r"\g<start>...",
    ),
    _Shape(re.compile(r"(?P<name>\bserial(?: number)?\s*[:=]\s*)(?!N/A)\w[\w-]*", re.IGNORECASE), r"\g<name>[serial]"),
    _Shape(re.compile(rf"(?<![\w:-])(?:{_HEX}{{2}}[:-]){{5}}{_HEX}{{2}}(?![\w:-])"), "[mac]"),
    _Shape(re.compile(rf"(?<![\w:.])(?:{_HEX}{{0,4}}:){{2,7}}{_HEX}{{0,4}}(?:%\w+)?(?![\w:])"), _address_6),
    # Versions of four parts: WSL's kernel, and packages pinned with ==.
    _Shape(re.compile(r"(?<![\d.])(?<!==)(?:\d{1,3}\.){3}\d{1,3}(?!\.?\d)(?!-microsoft)"), _address_4),
)
