"""Archives and downloads: whole and checked, or not at all, with nothing left behind."""

import hashlib
import http.server
import os
import tarfile
import threading
import zipfile

import pytest

from data_files import listing, write_tar, write_zip
from selectconv.errors import DataError
from selectconv.lab.data import obtain
from selectconv.lab.data.obtain import download, unpack

LIMIT = 100_000
GOOD = [("top/a.bin", b"A" * 700), ("top/sub/b.bin", b"B" * 512), ("top/empty", b"")]
UNPACKED = {"top": -1, "top/a.bin": 700, "top/sub": -1, "top/sub/b.bin": 512, "top/empty": 0}

each_kind = pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])


@pytest.fixture
def folder(tmp_path):
    """Where archives are unpacked to; what they must not reach lies beside."""
    (tmp_path / "victim.txt").write_text("unharmed")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "other.txt").write_text("mine")
    return folder


def write(path, members=GOOD):
    (write_zip if path.suffix == ".zip" else write_tar)(path, members)
    return path


def assert_refused(path, folder, message="damaged or refused", limit=LIMIT):
    before = listing(folder.parent)
    with pytest.raises(DataError, match=message) as caught:
        unpack(path, folder / "top", limit)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert listing(folder.parent) == before
    assert (folder.parent / "victim.txt").read_text() == "unharmed"


@each_kind
def test_unpacks_files_and_folders(folder, tmp_path, name):
    before = listing(folder)
    assert unpack(write(tmp_path / name), folder / "top", LIMIT) == folder / "top"
    assert listing(folder) == {**before, **UNPACKED}
    assert (folder / "top" / "sub" / "b.bin").read_bytes() == b"B" * 512


def test_another_process_may_be_faster(folder, tmp_path, monkeypatch):
    def others_first(source, target):
        os.mkdir(target)
        (target / "theirs").write_text("x")
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(obtain.os, "rename", others_first)
    assert unpack(write(tmp_path / "a.tar.gz"), folder / "top", LIMIT) == folder / "top"
    assert listing(folder / "top") == {"theirs": 1}
    assert not [name for name in listing(folder) if name.startswith(".")]


@each_kind
@pytest.mark.parametrize("member", ["../victim.txt", "top/../../victim.txt", "/victim.txt"])
def test_nothing_is_written_outside(folder, tmp_path, name, member):
    path = write(tmp_path / name, [("top/fine", b"x"), (member, b"overwritten")])
    before = listing(tmp_path)
    try:
        unpack(path, folder / "top", LIMIT)
    except DataError:
        assert listing(tmp_path) == before
    assert (tmp_path / "victim.txt").read_text() == "unharmed"
    assert all(new.startswith("data/top") for new in set(listing(tmp_path)) - set(before))
    assert not os.path.exists("/victim.txt")


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        (tarfile.SYMTYPE, "../../victim.txt"),
        (tarfile.LNKTYPE, "/etc/passwd"),
        (tarfile.CHRTYPE, ""),
        (tarfile.FIFOTYPE, ""),
    ],
)
def test_links_out_and_devices_are_refused(folder, tmp_path, kind, link):
    path = tmp_path / "a.tar.gz"
    write_tar(path, [("top/fine", b"x"), ("top/link", b"")], kind, link)
    assert_refused(path, folder)


@each_kind
def test_what_is_not_in_the_folder_is_left_out(folder, tmp_path, name):
    assert_refused(write(tmp_path / name, [("else/x", b"y")]), folder, "No such file .*top")
    unpack(write(tmp_path / name, [("top/x", b"x"), ("else/x", b"y")]), folder / "top", LIMIT)
    assert listing(folder) == {"other.txt": 4, "top": -1, "top/x": 1}


@each_kind
def test_bombs_are_refused(folder, tmp_path, name):
    path = write(tmp_path / name, [("top/a", b"\0" * LIMIT), ("top/b", b"\0")])
    assert path.stat().st_size < LIMIT / 50
    assert_refused(path, folder, "holds more than 100,000 bytes")
    assert unpack(path, folder / "top", LIMIT + 1) == folder / "top"


def test_a_zip_file_that_understates_its_size_is_refused(folder, tmp_path):
    path = write(tmp_path / "a.zip", [("top/a", b"\0" * LIMIT)])
    content = path.read_bytes().replace(LIMIT.to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(content)
    assert_refused(path, folder, limit=1000)


@each_kind
def test_a_truncated_archive_is_refused_wherever_it_is_cut(folder, tmp_path, name):
    path = write(tmp_path / name)
    whole = path.read_bytes()
    for length in (*range(0, len(whole) - 1, 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_refused(path, folder)


@each_kind
@pytest.mark.parametrize("where", [0.3, 0.5, 0.9])
def test_one_wrong_bit_is_noticed(folder, tmp_path, name, where):
    path = write(tmp_path / name, [("top/x", os.urandom(5000)), ("top/y", b"y" * 2000)])
    whole = bytearray(path.read_bytes())
    whole[int(len(whole) * where)] ^= 0x10
    path.write_bytes(bytes(whole))
    assert_refused(path, folder)


@each_kind
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x1f\x8b", b"<html>"])
def test_what_is_no_archive_is_refused(folder, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert_refused(tmp_path / name, folder)


def test_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch):
    class Full(zipfile.ZipExtFile):
        def read(self, size=-1):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile, "ZipExtFile", Full)
    assert_refused(write(tmp_path / "a.zip"), folder, "No space left on device")


# Downloads, from a server on this machine

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


TARGETS = {"moved": "/good", "to-a-file": "file:///etc/passwd"}
WHOLE = len(CONTENT)
# The status, the length that is announced, and how often the content is sent.
ANSWERS = {
    "gone": (404, 0, 0), "moved": (302, None, 0), "to-a-file": (302, None, 0), "empty": (204, 0, 0),
    "good": (200, WHOLE, 1), "unannounced": (200, None, 1), "short": (200, WHOLE + 1000, 1),
    "endless": (200, None, 100), "silent": (200, WHOLE, 0),
}  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        kind = self.path.rpartition("/")[2]
        status, length, copies = ANSWERS[kind]
        self.send_response(status, "Not here" if kind == "gone" else None)
        if kind in TARGETS:
            self.send_header("Location", TARGETS[kind])
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(CONTENT * copies)
        threading.Event().wait(1.0 if kind == "silent" else 0)

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
    monkeypatch.setattr(obtain, "_TIMEOUT_S", 0.2 if kind == "silent" else 60)
    (tmp_path / "x").write_text("old")
    with pytest.raises(DataError, match=message) as caught:
        download(url + kind, md5, tmp_path / "x", 2_000_000)
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == {"x": 3}
