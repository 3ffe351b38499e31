"""Container paths to host paths, in text: without mount namespaces "/tiercheck/memory" must become a folder of the host.

In environment values, command and arguments, every occurrence of a mount path of the container, alone or as the beginning
of a longer path, is replaced. It must begin a path (start of the text, or after a character that no path contains, such as
":" "=" or a space, or after "://") and end at a "/" or where the path ends; so "/data" is found in "A:/data/x" but neither in
"/srv/data" nor in "/database". The longest mount path wins, and what was replaced is not looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping


class PathTranslation:
    """Call it with a text; it returns the text as the host process must see it."""

    def __init__(self, mounts: Mapping[str, str]) -> None:
        self._hosts = {path.rstrip("/"): host for path, host in mounts.items() if path.rstrip("/")}
        longest_first = sorted(self._hosts, key=len, reverse=True)
        begins = r"(?:(?<![\w./~-])|(?<=://))"
        ends = r"(?=/|[^\w.-]|\.(?![\w])|$)"
        self._pattern = (
            re.compile(begins + "(" + "|".join(map(re.escape, longest_first)) + ")" + ends) if longest_first else None
        )

    def __call__(self, text: str) -> str:
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._hosts[match.group(1)], text)
