"""A local S3 server that may be slow and reports its requests."""

import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

BUCKET = "bucket"


class S3Server:
    """Serves from its construction to `close`. The bucket `bucket` is there.

    `seen(method, path)` is called for every request before it is answered, in a thread of the server's; an exception
    of it ends the request with status 500.
    """

    def __init__(self) -> None:
        self.seen: Callable[[str, str], None] = lambda method, path: None
        self._application: Any = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self.port = 0
        self.open()
        # What moto keeps belongs to the process: another module's server has left it.
        if not self.store().exists(BUCKET):
            self.store().mkdir(BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that uses it: address and credentials."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def open(self) -> None:
        """Listen; after `close` again on the same port, with the same content."""
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=_Quiet)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def reset(self) -> None:
        """Restore the initial state: open, unobserved, with an empty bucket."""
        self.seen = lambda method, path: None
        if self._server is None:
            self.open()
        store = self.store()
        for path in store.find(BUCKET):
            store.rm_file(path)

    def store(self) -> Any:
        """The store through s3fs."""
        from s3fs import S3FileSystem

        return S3FileSystem(
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            key="someone",
            secret="anything",
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        query = environ.get("QUERY_STRING", "")
        try:
            self.seen(environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"]) + (f"?{query}" if query else ""))
        except OSError as error:
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [str(error).encode()]
        return self._application(environ, start_response)


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Say nothing."""


def forget_stores() -> None:
    """Stores keep the environment that they were opened in; the next ones see that of now."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
