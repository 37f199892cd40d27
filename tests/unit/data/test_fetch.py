"""Downloads from a server on this machine: whole and checked, or not at all."""

import hashlib
import http.server
import threading

import pytest

from data_files import listing
from selectconv.errors import DataError
from selectconv.lab.data import obtain
from selectconv.lab.data.obtain import download

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        kind = self.path.rpartition("/")[2]
        if kind == "gone":
            self.send_error(404, "Not here")
            return
        targets = {"moved": "/good", "to-a-file": "file:///etc/passwd"}
        self.send_response(302 if kind in targets else 204 if kind == "empty" else 200)
        length = {"short": len(CONTENT) + 1000, "empty": 0}.get(kind, len(CONTENT))
        if kind in targets:
            self.send_header("Location", targets[kind])
        elif kind not in ("unannounced", "endless"):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if kind == "silent":
            threading.Event().wait(1.0)
        elif kind not in ("empty", *targets):
            for _ in range(100 if kind == "endless" else 1):
                self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *args):
        pass  # clients that hang up are what is tested


@pytest.fixture
def url(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()


@pytest.mark.parametrize("kind", ["good", "moved", "unannounced"])
def test_a_good_file_arrives(url, tmp_path, kind):
    assert download(url + kind, MD5, tmp_path / "x", 2_000_000).read_bytes() == CONTENT
    assert listing(tmp_path) == {"x": len(CONTENT)}


LONGER = hashlib.md5(CONTENT + bytes(1000)).hexdigest()


@pytest.mark.parametrize(
    ("kind", "md5", "message"),
    [
        ("gone", MD5, "is not available: HTTP Error 404: Not here"),
        ("empty", MD5, f"sent 0 bytes of MD5 .*, wanted {MD5}"),
        ("endless", MD5, "sends more than 2,000,000 bytes"),
        ("to-a-file", MD5, "is not available"),
        ("silent", MD5, "is not available: .*timed out"),
        ("good", "0" * 32, f"of MD5 {MD5}, wanted 0000"),
        ("short", LONGER, "sent 1,024,000 bytes"),  # the connection breaks off
    ],
)
def test_what_fails_is_named_and_leaves_the_old_file(
    url, tmp_path, monkeypatch, kind, md5, message
):
    monkeypatch.setattr(obtain, "_TIMEOUT_S", 0.2)
    (tmp_path / "x").write_text("old")
    with pytest.raises(DataError, match=message) as caught:
        download(url + kind, md5, tmp_path / "x", 2_000_000)
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == {"x": 3}
