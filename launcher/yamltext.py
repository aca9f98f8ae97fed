"""YAML as all files of the launcher are read: safe, and by libyaml where PyYAML was built with it."""

from typing import Any

import yaml

# Six times as fast; the pure loader is there in every build.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str) -> Any:
    """Return the document in a text.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return yaml.load(text, Loader=_LOADER)
