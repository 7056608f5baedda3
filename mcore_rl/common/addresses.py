"""Checks of addresses from the user, and of a header from an environment variable."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
from urllib.parse import SplitResult, urlsplit

from mcore_rl.common.errors import UsageError

_HEADER = re.compile(
    r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>[\x21-\x7e][\x20-\x7e]*)"
)


def checked_url(url: str, flag: str) -> SplitResult:
    """Return the parts of an http or https address. Raises UsageError for any other address, and
    for one with a user, password, query or fragment, which the run's files would keep."""
    if "?" in url or "#" in url:  # checked first: a later message would show an invalid address
        raise UsageError(
            "has a query or fragment (from ? or # on), which files of the run would keep",
            flag=flag,
            remedy="leave it out and put a key into a header, by an environment variable",
        )
    try:
        parts = urlsplit(url)
        has_password = parts.username is not None or parts.password is not None
        host = (parts.hostname or "").rstrip(".")
        host.encode("idna")  # a name that DNS cannot hold raises
        valid = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # also a port that is not a number, and brackets that do not match
        valid = has_password = False
    if has_password or (not valid and "@" in url):
        raise UsageError(
            "has a user or password in it, which everybody on the machine can read there",
            flag=flag,
            remedy="leave it out and put an Authorization header into an environment variable",
        )
    if not valid or not url.isprintable() or any(character.isspace() for character in url):
        raise UsageError(
            "is not an http:// or https:// address",
            flag=f"{flag} {url}",
            remedy="give one with a host",
        )
    return parts


def header_from(variable: str | None, flag: str) -> dict[str, str]:
    """Return the header that an environment variable holds as `Header: value`; empty for None.

    It may be a secret, so no message contains any part of it. Raises UsageError if it is not set or
    malformed.
    """
    if variable is None:
        return {}
    text = os.environ.get(variable)
    refusal = functools.partial(UsageError, flag=f"{flag} {variable}")
    if text is None:
        found = "names an environment variable that is not set"
        raise refusal(found, remedy="export it as 'Header: value'")
    match = _HEADER.fullmatch(text.strip())
    if match is None:
        raise refusal(
            "names an environment variable whose value is not of the form 'Header: value' in one "
            "line of printable ASCII",
            remedy="correct the value, which is not shown here",
        )
    return {match["name"]: match["value"]}


def is_loopback(host: str) -> bool:
    """Return whether `host` is "localhost" or a loopback address; names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
