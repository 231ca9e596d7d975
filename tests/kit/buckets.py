"""A server of S3's interface on loopback, what is in its buckets, and what is requested of it."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
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


@contextmanager
def around_requests(see: Callable[[str], None]) -> Iterator[list[int]]:
    """Call something before and after each request of this process, with what is requested, and of what object.

    Yields the number of bytes that each has brought.
    """
    from s3fs import S3FileSystem

    original, brought = S3FileSystem._call_s3, list[int]()

    async def call_s3(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        what = f"{method} {kwargs.get('Key') or kwargs.get('Prefix') or ''}"
        see(what)
        result = await original(self, method, *args, **kwargs)
        see(f"after {what}")
        brought.append(int(result.get("ContentLength", 0)) if method == "get_object" else 0)
        return result

    S3FileSystem._call_s3 = call_s3
    try:
        yield brought
    finally:
        S3FileSystem._call_s3 = original


def failing(words: str, error: Exception) -> Callable[[str], None]:
    """For `around_requests`: raise an error before each request that matches a pattern."""

    def see(what: str) -> None:
        if re.fullmatch(words, what):
            raise error

    return see


def another_program() -> Any:
    """A client of the server that the environment names; also where requests of s3fs run, and cannot be waited for."""
    from botocore.session import get_session

    return get_session().create_client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def put(client: Any, address: str, content: bytes) -> None:
    bucket, _, key = address.removeprefix("s3://").partition("/")
    client.put_object(Bucket=bucket, Key=key, Body=content)
