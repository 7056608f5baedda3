"""Print pip's configuration of indexes and connections as variables of uv.

uv does not read that configuration. The output is shell code; variables that the caller has set
keep their values.
"""

import ast
import os
import shlex
import subprocess
import sys

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}

pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
listed = subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=True).stdout
pairs = [line.partition("=")[::2] for line in listed.splitlines()]
settings = {}
for section in ("global.", "install.", ":env:."):  # the later one wins
    for key, value in pairs:
        if key.startswith(section):
            settings[key.removeprefix(section)] = ast.literal_eval(value).split()
for name, variable in VARIABLES.items():
    if settings.get(name) and variable not in os.environ:
        separator = "," if name == "find-links" else " "
        print(f"export {variable}={shlex.quote(separator.join(settings[name]))}")
if settings.get("no-index") in (["1"], ["true"], ["yes"], ["on"]):  # uv has no variable for it
    print("uv_flags+=(--no-index)")
