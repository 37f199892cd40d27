"""Archives: unpacked whole, or refused with nothing left behind."""

import gzip
import os
import stat
import tarfile
import zipfile

import pytest

from data_files import listing, tar_member, write_tar, write_zip, zip_symlink
from selectconv.errors import DataError
from selectconv.lab.data.obtain import archive as module
from selectconv.lab.data.obtain.archive import extract

LIMIT = 100_000
GOOD = [("top/a.bin", b"A" * 700), ("top/sub/b.bin", b"B" * 512), ("top/empty", b"")]
UNPACKED = {"top": -1, "top/a.bin": 700, "top/sub": -1, "top/sub/b.bin": 512, "top/empty": 0}


def unpack(path, folder, limit=LIMIT):
    return extract(path, folder, top="top", max_bytes=limit)


@pytest.fixture
def folder(tmp_path):
    """Where archives are unpacked to; what they must not reach lies beside."""
    (tmp_path / "victim.txt").write_text("unharmed")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "other.txt").write_text("mine")
    return folder


def write_good(path):
    if path.suffix == ".zip":
        write_zip(path, GOOD)
    else:
        write_tar(path, GOOD, mode="w" if path.suffix == ".tar" else "w:gz")
    return path


def assert_refused(path, folder, message, limit=LIMIT):
    before = listing(folder.parent)
    with pytest.raises(DataError, match=message) as caught:
        unpack(path, folder, limit)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert listing(folder.parent) == before
    assert (folder.parent / "victim.txt").read_text() == "unharmed"


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zip", "misnamed.zip.tgz"])
def test_unpacks_files_and_folders(folder, tmp_path, name):
    path = write_good(tmp_path / name)
    before = listing(folder)
    assert unpack(path, folder) == folder / "top"
    assert listing(folder) == {**before, **UNPACKED}
    assert (folder / "top" / "sub" / "b.bin").read_bytes() == b"B" * 512


def test_folders_and_odd_but_harmless_names(folder, tmp_path):
    path = tmp_path / "a.tar.gz"
    long = "top/" + "d" * 120 + "/" + "f" * 120  # needs an extended header
    members = [
        (tar_member("./top/", tarfile.DIRTYPE), None),
        ("./top//x", b"1"),
        (long, b"2"),
        ("top/..x", b"3"),
    ]
    write_tar(path, members)
    unpack(path, folder)
    assert (folder / "top" / "x").read_bytes() == b"1"
    assert (folder / long).read_bytes() == b"2"
    assert (folder / "top" / "..x").read_bytes() == b"3"


def test_permissions_are_not_taken_over(folder, tmp_path):
    info = tar_member("top/x", tarfile.REGTYPE)
    info.mode = 0o6777
    write_tar(tmp_path / "a.tar", [(info, b"")], mode="w")
    unpack(tmp_path / "a.tar", folder)
    assert stat.S_IMODE((folder / "top" / "x").stat().st_mode) & 0o7111 == 0


def test_what_is_there_stays(folder, tmp_path):
    (folder / "top").mkdir()
    (folder / "top" / "mine").write_text("mine")
    before = listing(folder)
    path = write_good(tmp_path / "a.zip")
    assert unpack(path, folder) == folder / "top"
    path.write_text("not even opened")
    assert unpack(path, folder) == folder / "top"
    assert listing(folder) == before


def test_another_process_may_be_faster(folder, tmp_path, monkeypatch):
    path = write_good(tmp_path / "a.tar.gz")

    def others_first(source, target):
        os.mkdir(target)
        (target / "theirs").write_text("x")
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(module.os, "rename", others_first)
    assert unpack(path, folder) == folder / "top"
    assert listing(folder / "top") == {"theirs": 1}
    assert not [name for name in listing(folder) if name.startswith(".")]


ESCAPES = [
    "../victim.txt",
    "top/../../victim.txt",
    "top/..",
    "/victim.txt",
    "//victim.txt",
    "top\\..\\victim.txt",
    "C:/victim.txt",
    "top/a:stream",
    "..",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_path_that_leads_out_is_refused_in_a_tar_file(folder, tmp_path, name):
    path = tmp_path / "a.tar.gz"
    write_tar(path, [("top/fine", b"x"), (name, b"overwritten")])
    assert_refused(path, folder, "is refused: member .* leads out of its folder")


@pytest.mark.parametrize("name", ESCAPES)
def test_a_path_that_leads_out_is_refused_in_a_zip_file(folder, tmp_path, name):
    path = tmp_path / "a.zip"
    write_zip(path, [("top/fine", b"x"), (name, b"overwritten")])
    assert_refused(path, folder, "is refused: member .* leads out of its folder")


def test_an_absolute_path_to_a_real_file_is_refused(folder, tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, [(str(tmp_path / "victim.txt"), b"overwritten")], mode="w")
    assert_refused(path, folder, "leads out")


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        (tarfile.SYMTYPE, "../../victim.txt"),
        (tarfile.SYMTYPE, "fine"),
        (tarfile.LNKTYPE, "top/fine"),
        (tarfile.LNKTYPE, "/etc/passwd"),
        (tarfile.CHRTYPE, ""),
        (tarfile.BLKTYPE, ""),
        (tarfile.FIFOTYPE, ""),
        (tarfile.GNUTYPE_SPARSE, ""),
        (b"Z", ""),
    ],
)
def test_links_devices_and_strange_kinds_are_refused(folder, tmp_path, kind, link):
    path = tmp_path / "a.tar.gz"
    # Through a link a later member would be written elsewhere.
    write_tar(
        path,
        [("top/fine", b"x"), (tar_member("top/link", kind, link), None), ("top/link/x", b"y")],
    )
    assert_refused(path, folder, "member 'top/link' is neither a file nor a folder|NotADirectory")


def test_a_symbolic_link_in_a_zip_file_is_refused(folder, tmp_path):
    path = tmp_path / "a.zip"
    write_zip(path, [("top/fine", b"x"), (zip_symlink("top/link"), b"/etc")])
    assert_refused(path, folder, "member 'top/link' is neither a file nor a folder")


@pytest.mark.parametrize("name", ["elsewhere/x", "x", "topx/x"])
@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_a_member_outside_the_only_folder_is_refused(folder, tmp_path, name, suffix):
    path = tmp_path / f"a.{suffix}"
    (write_zip if suffix == "zip" else write_tar)(path, [("top/x", b"x"), (name, b"y")])
    assert_refused(path, folder, f"has '{name}', wanted everything inside 'top'")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("suffix", ["zip", "tar"])
def test_a_second_member_of_the_same_name_is_refused(folder, tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    members = [("top/x", b"checked"), ("top/x", b"used")]
    write_zip(path, members) if suffix == "zip" else write_tar(path, members, mode="w")
    assert_refused(path, folder, "has 'top/x' twice")


@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_a_file_as_the_folder_of_another_is_refused(folder, tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    members = [("top/x", b"1"), ("top/x/y", b"2")]
    (write_zip if suffix == "zip" else write_tar)(path, members)
    assert_refused(path, folder, "cannot be unpacked into")


@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_a_folder_in_the_place_of_a_file_is_refused(folder, tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "zip":
        write_zip(path, [("top/x", b"1"), ("top/x/", b"")])
    else:
        write_tar(path, [("top/x", b"1"), (tar_member("top/x", tarfile.DIRTYPE), None)])
    assert_refused(path, folder, "has 'top/x' twice")


@pytest.mark.parametrize("suffix", ["zip", "tar"])
def test_a_member_that_announces_too_much_is_not_begun(folder, tmp_path, monkeypatch, suffix):
    path = tmp_path / f"a.{suffix}"
    members = [("top/x", b"x" * (LIMIT + 1))]
    write_zip(path, members) if suffix == "zip" else write_tar(path, members, mode="w")
    library = zipfile.ZipFile if suffix == "zip" else tarfile.TarFile
    monkeypatch.setattr(library, "extract", lambda *arguments, **options: pytest.fail("begun"))
    assert_refused(path, folder, "unpacks to more than 100,000 bytes")


@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_bombs_are_refused(folder, tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    members = [("top/a", b"\0" * LIMIT), ("top/b", b"\0")]
    (write_zip if suffix == "zip" else write_tar)(path, members)
    assert path.stat().st_size < LIMIT / 50
    assert_refused(path, folder, r"unpacks to more than 100,000 bytes")
    assert unpack(path, folder, LIMIT + 1) == folder / "top"


def test_a_zip_file_that_understates_its_size_is_refused(folder, tmp_path):
    path = tmp_path / "a.zip"
    write_zip(path, [("top/a", b"\0" * LIMIT)])
    content = path.read_bytes().replace(LIMIT.to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(content)
    assert_refused(path, folder, "damaged or truncated|more than", limit=1000)


def test_a_bomb_in_a_header_is_refused(folder, tmp_path):
    # An extended header is read into memory whole, whatever size it announces.
    info = tar_member("top/x", tarfile.XHDTYPE)
    info.size = 50_000_000
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb") as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(50):
            file.write(b"\0" * 1_000_000)
    assert_refused(path, folder, "unpacks to more than 100,000 bytes")


def test_too_many_members_are_refused(folder, tmp_path, monkeypatch):
    path = write_good(tmp_path / "a.tar.gz")
    monkeypatch.setattr(module, "_MAX_MEMBERS", 2)
    assert_refused(path, folder, "has more than 2 members")


def test_a_negative_size_does_not_send_us_round_in_circles(folder, tmp_path):
    info = tar_member("top/x", tarfile.REGTYPE)
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + (2**16 - 1024).to_bytes(2, "big")  # -1024, base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(header) + b"\0" * 1024)
    assert_refused(path, folder, "neither a file nor a folder|damaged or truncated")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.zip"])
def test_a_truncated_archive_is_refused_wherever_it_is_cut(folder, tmp_path, name):
    path = write_good(tmp_path / name)
    whole = path.read_bytes()
    # tar: whole blocks that end the archive may be missing as long as one is there.
    needed = 512 * 6 if name == "a.tar" else len(whole) - 1
    step = 37 if name == "a.tar" else 7
    for length in [*range(0, needed, step), 512 * 2, 512 * 3, 512 * 5, needed]:
        if length <= needed and length < len(whole):
            path.write_bytes(whole[:length])
            assert_refused(path, folder, "damaged or truncated|has no folder 'top'|cannot be unp")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip"])
def test_a_damaged_archive_is_refused(folder, tmp_path, name):
    path = tmp_path / name
    content = os.urandom(5000)
    (write_zip if name == "a.zip" else write_tar)(path, [("top/x", content)])
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(bytes(whole))
    assert_refused(path, folder, "damaged or truncated|cannot be unpacked")


def test_a_damaged_header_is_not_taken_for_the_end(folder, tmp_path):
    path = write_good(tmp_path / "a.tar")
    content = bytearray(path.read_bytes())
    content[512 * 3 + 10] ^= 0xFF  # in the name of the second member
    path.write_bytes(bytes(content))
    assert_refused(path, folder, "damaged or truncated: bad checksum")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x1f\x8b", b"<html>", b"\0" * 1024])
def test_what_is_no_archive_is_refused(folder, tmp_path, content):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(content)
    assert_refused(path, folder, "damaged or truncated|cannot be unpacked|has no folder 'top'")


def test_an_encrypted_zip_file_is_refused(folder, tmp_path):
    path = tmp_path / "a.zip"
    write_zip(path, [("top/x", b"x")])
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag, in the member's header and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(bytes(content))
    assert_refused(path, folder, "damaged or truncated: .*encrypted")


def test_a_missing_archive_and_a_missing_folder_are_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"none.zip cannot be unpacked into .*No such file"):
        unpack(tmp_path / "none.zip", folder)
    path = write_good(tmp_path / "a.zip")
    with pytest.raises(DataError, match=r"cannot be unpacked into .*nowhere.*No such file"):
        unpack(path, tmp_path / "nowhere")


def test_a_full_disk_leaves_nothing(folder, tmp_path, monkeypatch):
    path = write_good(tmp_path / "a.zip")

    class Full(zipfile.ZipExtFile):
        def read(self, size=-1):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile, "ZipExtFile", Full)
    assert_refused(path, folder, "No space left on device")
