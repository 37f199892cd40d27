"""Downloads from a server on this machine: whole and checked, or not at all."""

import functools
import hashlib
import http.server
import threading

import pytest

from data_files import listing
from selectconv.errors import DataError
from selectconv.lab.data.obtain.fetch import Download, download

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def __init__(self, hits, *args):
        self.hits = hits
        super().__init__(*args)

    def do_GET(self):
        self.hits.append(self.path)
        kind = self.path.rpartition("/")[2]
        if kind == "gone":
            self.send_error(404, "Not here")
            return
        if kind == "moved":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.end_headers()
            return
        if kind == "redirect-to-file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        self.send_response(204 if kind == "empty" else 200)
        length = {"short": len(CONTENT) + 1000, "huge": 10**12, "empty": 0}.get(kind, len(CONTENT))
        if kind not in ("unannounced", "endless"):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if kind == "silent":
            self.hits.append("waiting")
            threading.Event().wait(1.0)
        elif kind == "endless":
            try:
                for _ in range(100):
                    self.wfile.write(CONTENT)
            except OSError:
                pass  # the client hung up, as it should
        elif kind != "empty":
            self.wfile.write(CONTENT)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *args):
        pass  # clients that hang up are what is tested


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    hits = []
    handler = functools.partial(Handler, hits)
    with Server(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        running.hits = hits
        yield running
        running.shutdown()


def source(server, kind, md5=MD5, max_bytes=2_000_000):
    return Download(f"http://127.0.0.1:{server.server_address[1]}/{kind}", md5, max_bytes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    return tmp_path


def assert_fails(folder, wanted, message, **options):
    before = listing(folder)
    with pytest.raises(DataError, match=message) as caught:
        download(wanted, folder, **options)
    assert wanted.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert listing(folder) == before


@pytest.mark.parametrize("kind", ["good", "moved", "unannounced"])
def test_a_good_file_arrives(server, folder, kind):
    before = listing(folder)
    path = download(source(server, kind), folder)
    assert path == folder / kind
    assert path.read_bytes() == CONTENT
    assert listing(folder) == {**before, kind: len(CONTENT)}


def test_a_file_that_is_there_is_replaced_by_a_good_one_only(server, folder):
    (folder / "good").write_text("old")
    assert_fails(folder, source(server, "good", md5="0" * 32), "has the MD5")
    assert (folder / "good").read_text() == "old"
    download(source(server, "good"), folder)
    assert (folder / "good").read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused(server, folder):
    wanted = source(server, "good", md5="0" * 32)
    assert_fails(folder, wanted, f"has the MD5 {MD5}, wanted 00000")


def test_a_status_of_404_is_named(server, folder):
    assert_fails(folder, source(server, "gone"), "is not available: status 404, Not here")


def test_a_success_without_content_is_refused(server, folder):
    assert_fails(folder, source(server, "empty"), "answered with status 204, wanted 200")


def test_a_connection_that_breaks_off_is_noticed(server, folder):
    # The checksum of what came is right: the length alone tells.
    assert_fails(folder, source(server, "short"), "broke off after 1,024,000 of 1,025,000 bytes")


def test_a_file_that_is_announced_too_large_is_not_begun(server, folder):
    message = "announces 1,000,000,000,000 bytes, wanted at most 2,000,000"
    assert_fails(folder, source(server, "huge"), message)


def test_a_file_that_does_not_end_is_cut_off(server, folder):
    message = "sends more than the 2,000,000 bytes accepted"
    assert_fails(folder, source(server, "endless"), message)


def test_a_redirection_to_a_local_file_is_refused(server, folder):
    assert_fails(folder, source(server, "redirect-to-file"), "is not available")


def test_a_silent_server_is_given_up(server, folder):
    assert_fails(folder, source(server, "silent"), "timed out", timeout_s=0.2)
    assert "waiting" in server.hits


def test_nobody_there(folder, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_address[1]
    wanted = Download(f"http://127.0.0.1:{port}/x", MD5, 10)
    assert_fails(folder, wanted, "is not available: .*refused")


def test_an_impossible_address(folder):
    assert_fails(folder, Download("nonsense", MD5, 10), "is not available: unknown url type")


def test_a_folder_that_is_not_there(server, tmp_path):
    with pytest.raises(DataError, match="No such file"):
        download(source(server, "good"), tmp_path / "nowhere")
    assert server.hits == []


def test_a_bar_is_shown_and_not_needed(server, folder, capfd, monkeypatch):
    pytest.importorskip("rich", reason="the bar is rich's (the train extra)")
    download(source(server, "good"), folder)
    assert "good" in capfd.readouterr().err
    monkeypatch.setattr("selectconv.lab.data.progress.importlib.util.find_spec", lambda name: None)
    download(source(server, "good"), folder)
    assert capfd.readouterr().err == ""
