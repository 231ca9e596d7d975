"""A server of S3's interface on loopback, and what is in its buckets."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def served() -> Iterator[dict[str, str]]:
    """Let a server run with an empty bucket `bucket`; gives the environment variables by which s3fs finds it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    os.environ.update(variables)
    try:
        file_system().mkdir("bucket")
        yield variables
    finally:
        server.stop()


def file_system() -> Any:
    """The file system of the server that the environment names."""
    import fsspec

    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    return fs


def objects(folder: str) -> dict[str, int]:
    """Return the sizes of all objects below an address, by their paths from there."""
    place = folder.removeprefix("s3://")
    found = file_system().find(place, detail=True)
    return {name[len(place) + 1 :]: int(item["size"]) for name, item in found.items()}
